"""Estimates of LoRA on a quantized base, beside what bitsandbytes' tensors take and what plain layers are estimated at."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harmony_ds.config import load_config
from harmony_ds.decomposer.graph import ParameterSpec, slab_bytes
from harmony_ds.estimate.lora import add_adapters
from harmony_ds.estimate.quantized import Quantization, quantize_linear_layers
from harmony_ds.estimate.subject import Subject
from harmony_ds.estimate.survey import Survey, estimate, measure
from harmony_ds.profiling.hardware import hardware_of
from harmony_ds.profiling.roofline import on_meta
from tests import quantized

HARDWARE = hardware_of("rtx4090")
CONFIG = load_config(
    {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "harmony": {"device": "cpu"}}
)
WIDTH, TOKENS = 1024, 32
PADDING_BYTES = 6 * 64
"""Each of a weight's tensors begins at a multiple of 64 bytes: codes, scales, the scales' scales, two tables, a mean."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def survey_of(how: Quantization | None) -> Survey:
    with torch.device("meta"):
        model, inputs = Net(), {"x": torch.zeros(TOKENS, WIDTH)}
    if how is not None:
        quantize_linear_layers(model, how)
    add_adapters(model, 4)
    return estimate(Subject(model, inputs), CONFIG, HARDWARE)


def frozen(survey: Survey) -> list[ParameterSpec]:
    return [spec for spec in survey.graph.parameters if not spec.trainable and len(spec.shape) == 2]


@pytest.mark.parametrize(
    ("kind", "how"), [("bitsandbytes NF4, double", Quantization.NF4), ("hand-written wrapper", Quantization.INT8)]
)
def test_stored_bytes_are_those_of_real_quantized_tensors(kind: str, how: Quantization) -> None:
    model = quantized.build(kind)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, quantized.LoraLinear)}
    found = measure(Subject(model, quantized.batch(0)), CONFIG).graph
    assert len(layers) == 7 * quantized.LAYERS
    for name, layer in layers.items():
        stored_bytes = found.parameter(f"{name}.base.weight").stored_bytes
        assert stored_bytes is not None
        assert 0 <= stored_bytes - how.stored_bytes(len(layer.b), layer.a.shape[1]) <= PADDING_BYTES


@pytest.mark.parametrize(("how", "least"), [(Quantization.NF4, 0.5159), (Quantization.INT8, 1.0)])
def test_a_base_travels_as_its_stored_bytes_and_only_adapters_have_gradients(how: Quantization, least: float) -> None:
    survey = survey_of(how)
    assert how.stored_bytes(WIDTH, WIDTH) == pytest.approx(least * WIDTH**2, rel=5e-3)
    assert [spec.stored_bytes for spec in frozen(survey)] == [slab_bytes(how.stored_bytes(WIDTH, WIDTH), 1)] * 3
    trained = sum(spec.numel for spec in survey.graph.parameters if spec.trainable)
    assert trained == 3 * 2 * 4 * WIDTH


def test_each_product_dequantizes_its_weight() -> None:
    """One operation reads the stored bytes and writes the weight, which takes memory until the product is made."""
    stored_bytes, weight_bytes = Quantization.NF4.stored_bytes(WIDTH, WIDTH), 4 * WIDTH**2
    dequantize_ms = (stored_bytes + weight_bytes) / HARDWARE.kernels().bytes_per_ms
    plain, packed = survey_of(None).costs.costs[1], survey_of(Quantization.NF4).costs.costs[1]

    issuing_ms = 2 * HARDWARE.kernels().kernel_ms
    assert packed.forward_ms - plain.forward_ms == pytest.approx(dequantize_ms, abs=issuing_ms)
    assert packed.backward_ms - plain.backward_ms == pytest.approx(2 * dequantize_ms, abs=2 * issuing_ms)
    assert packed.forward.peak_bytes - plain.forward.peak_bytes == pytest.approx(weight_bytes, rel=0.1)


def test_what_needs_the_values_of_a_quantized_weight_is_refused() -> None:
    with torch.device("meta"):
        model = Net()
    quantize_linear_layers(model, Quantization.NF4)
    weight = model.layers[0].weight
    with on_meta(HARDWARE.kernels()), pytest.raises(NotImplementedError, match=r"mul.*quantized weight"):
        weight * 2
