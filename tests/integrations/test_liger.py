"""Liger's kernels in a model that an engine trains, by Triton's interpreter: `pip install triton liger-kernel`.

tests/gpu/test_long_rows.py runs them on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.drive import config_of, engine_for, seed_of, sgd, train_groups
from tests.families import Batch, build_transformer
from tests.oracle import train_plainly

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
HIDDEN = 32


@pytest.fixture(scope="module", autouse=True)
def liger() -> Iterator[Any]:
    """Liger's functions for transformers, whose kernels are interpreted.

    The interpreter leaves two things out: scalars that are not whole are no tensors, and `libdevice` is empty.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read when kernels are defined
        numpy = pytest.importorskip("numpy")
        language = pytest.importorskip("triton.language")
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        found = pytest.importorskip("liger_kernel.transformers")
        norms, as_tensor = pytest.importorskip("liger_kernel.ops.rms_norm"), interpreter._implicit_cvt

        def with_floats(argument: Any) -> Any:
            if not isinstance(argument, float):
                return as_tensor(argument)
            value = numpy.array([argument], dtype=numpy.float32)
            return language.tensor(interpreter.TensorHandle(value, language.float32), language.float32)

        patch.setattr(interpreter, "_implicit_cvt", with_floats)
        patch.setattr(norms, "rsqrt", lambda value: 1.0 / language.sqrt(value))
        yield found


def llama(liger: Any, vocabulary: int, **kernels: bool) -> nn.Module:
    model = build_transformer(
        "LlamaForCausalLM",
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    if kernels:
        liger.apply_liger_kernel_to_llama(model=model, **kernels)
        model.forward = MethodType(model.forward.__func__, model)
    return model


def groups_of_rows(vocabulary: int, length: int) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, vocabulary, (1, length), generator=generator) for _ in range(4)]
    batches = [{"input_ids": row, "labels": row.masked_fill(row % 5 == 0, -100)} for row in rows]
    return [batches[:2], batches[2:]]


@pytest.mark.timeout(600)
def test_kernels_train_bit_by_bit_as_in_plain_pytorch(liger: Any) -> None:
    kernels = {"rope": False, "rms_norm": True, "swiglu": True, "fused_linear_cross_entropy": True}
    plain, model = (llama(liger, 64, **kernels) for _ in range(2))
    groups = groups_of_rows(64, length=6)
    train_plainly(plain, groups, sgd(plain.parameters()), clip=1.0, seed_of=seed_of)

    with engine_for(model, sgd, config_of(2, clip=1.0, harmony={"pack_layers": 1})) as engine:
        train_groups(engine, groups)
        assert engine.swap_report().ratio == 1.0

    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.timeout(600)
def test_a_fused_loss_never_makes_all_logits(liger: Any) -> None:
    vocabulary, length = 2048, 24
    peaks = []
    kernels = {"rope": False, "rms_norm": False, "swiglu": False}
    for model in (llama(liger, vocabulary), llama(liger, vocabulary, fused_linear_cross_entropy=True, **kernels)):
        harmony = {"pack_layers": 1, "tokens": "off"}
        with engine_for(model, sgd, config_of(2, harmony=harmony)) as engine:
            train_groups(engine, groups_of_rows(vocabulary, length)[:1])
            report = engine.memory_report()
        assert report.device_peak_bytes == report.planned_peak_bytes
        peaks.append(report.device_peak_bytes)

    whole, fused = peaks
    assert fused < whole - vocabulary * length * 4
