"""Mixed precision: bf16 and fp16 with fp32 masters, loss scaling, DeepSpeed's own optimizers, and what the host holds."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.utils import safe_get_full_fp32_param
from tests.cover import spread
from tests.engine.drive import (
    EVERY_FAMILY,
    Groups,
    adamw,
    config_of,
    engine_for,
    family,
    groups_of,
    means_of,
    seed_of,
    sgd,
    train_groups,
    weights_of,
)
from tests.engine.sizes import layer_bytes
from tests.families import Family
from tests.oracle import assert_same, train_plainly, train_plainly_half, with_floating_dtype

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
# torch's batch_norm wants running statistics of the input's dtype on the CPU.
BITWISE = [f for f in EVERY_FAMILY if f.bitwise and f.name not in ("resnet", "BatchNormNet")]


def half_groups(one: Family, steps: int, accumulation: int, dtype: torch.dtype = torch.bfloat16) -> Groups:
    return [[with_floating_dtype(b, dtype) for b in group] for group in groups_of(one, steps, accumulation)]


@pytest.mark.parametrize(("one", "clip"), spread(BITWISE, (None, 0.5)), ids=str)
def test_bf16_equals_the_plain_mixed_precision_loop(one: Family, clip: float | None) -> None:
    config = config_of(3, clip, {"pack_layers": 1}, **BF16)
    losses, expected = assert_masters_and_weights_are_plain(one, half_groups(one, 2, 3), config)
    assert losses == pytest.approx(expected, rel=1e-2)


def assert_masters_and_weights_are_plain(
    one: Family, groups: Groups, config: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """The engine's masters and weights are those of the plain loop in bf16; the losses of both."""
    plain, model = one.build(0.1), one.build(0.1)
    expected = train_plainly_half(plain, groups, adamw, clip=config["gradient_clipping"] or None, seed_of=seed_of)
    with engine_for(model, adamw, config) as engine:
        losses = [engine.train_batch(iter(group)).float().item() for group in groups]
        engine.finish_updates()
        masters = [p for group in engine.optimizer.param_groups for p in group["params"]]
        assert all(p.dtype == torch.bfloat16 for p in engine.module.parameters())
        for master, wanted in zip(masters, expected.masters.values(), strict=True):
            assert master.dtype == torch.float32 and torch.equal(master, wanted)
    assert_same(model, plain, bitwise=True)
    return losses, means_of(expected.losses)


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
@pytest.mark.parametrize("reads_first", [True, False])
def test_a_parameter_after_the_last_layer_sums_in_fp32_when_losses_are_read(reads_first: bool) -> None:
    one = family("BareParameterNet")
    groups, plain, model = half_groups(one, 2, 8), one.build(0.0), one.build(0.0)
    expected = train_plainly_half(plain, groups, sgd, clip=None, seed_of=seed_of)
    with engine_for(model, sgd, config_of(8, None, {"pack_layers": 1}, **BF16)) as engine:
        for group in groups:
            losses = [engine(**batch)["loss"] for batch in group]
            for act in (Tensor.item, engine.backward) if reads_first else (engine.backward, Tensor.item):
                list(map(act, losses))
            for _ in losses:
                engine.step()
        assert torch.equal(safe_get_full_fp32_param(model.shift), expected.masters["shift"])


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_accumulated_in_bf16(clip: float | None) -> None:
    groups = groups_of(LLAMA, 3, 4)
    plain = LLAMA.build(0.1)
    run = train_plainly_half(plain, groups, adamw, clip=clip, seed_of=seed_of, accumulate=torch.bfloat16)
    model = LLAMA.build(0.1)
    config = config_of(4, clip, {"pack_layers": 2}, data_types={"grad_accum_dtype": "bf16"}, **BF16)
    with engine_for(model, adamw, config) as engine:
        assert train_groups(engine, groups) == means_of(run.losses)
    # clip_grad_norm_ of fp32 copies adds up the squares in other blocks than a norm of bf16 in fp32 does.
    assert_same(model, plain, bitwise=clip is None, relative=0.008)


@pytest.mark.parametrize("residency", ["off", 100])
@pytest.mark.parametrize(
    ("block", "compute", "accumulate"),
    [
        ({}, torch.float32, "bf16"),
        (BF16, torch.bfloat16, "fp16"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, torch.float16, "bf16"),
    ],
    ids=["bf16 of fp32", "fp16 of bf16", "bf16 of fp16"],
)
def test_gradients_accumulated_in_a_third_dtype(
    block: dict[str, Any], compute: torch.dtype, accumulate: str, residency: Any
) -> None:
    groups = groups_of(LLAMA, 3, 4)
    plain, sums = LLAMA.build(0.1), {"bf16": torch.bfloat16, "fp16": torch.float16}[accumulate]
    scale = 128.0 if compute == torch.float16 else 1.0
    run = train_plainly_half(
        plain, groups, adamw, clip=None, seed_of=seed_of, dtype=compute, accumulate=sums, scale=scale
    )
    model = LLAMA.build(0.1)
    harmony = {"pack_layers": 2, "residency": residency}
    config = config_of(4, None, harmony, data_types={"grad_accum_dtype": accumulate}, **block)
    with engine_for(model, adamw, config) as engine:
        assert train_groups(engine, groups) == means_of(run.losses)
        assert engine.swap_report().ratio == 1.0 or residency != "off"
    assert_same(model, plain, bitwise=True)


def test_sums_in_bf16_are_clipped_in_the_masters_dtype_for_an_optimizer_with_hooks() -> None:
    """Such an optimizer is stepped as a whole. The product of a sum and the factor of clipping is not rounded to bf16."""

    def with_a_hook(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    groups, sums, clip = groups_of(LLAMA, 1, 2), torch.bfloat16, 0.3
    plain, model = LLAMA.build(0.0), LLAMA.build(0.0)
    train_plainly_half(plain, groups, with_a_hook, clip=clip, seed_of=seed_of, dtype=torch.float32, accumulate=sums)
    config = config_of(2, clip, {"pack_layers": 2}, data_types={"grad_accum_dtype": "bf16"})
    with engine_for(model, with_a_hook, config) as engine:
        train_groups(engine, groups)
    assert_same(model, plain, bitwise=False)


class WithBuffers(nn.Module):
    """A layer with a buffer that it multiplies with, one that it wants in fp32, and one of integers."""

    _keep_in_fp32_modules_strict = ("wide",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        for name in ("scale", "wide"):
            self.register_buffer(name, torch.full((4,), 1 / 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer((inputs * self.scale).to(self.layer.weight.dtype)).float().mean()


def test_buffers_are_cast_where_the_ds_config_says_so() -> None:
    for data_types, expected in (({}, torch.float32), ({"buffer_dtype": "bf16"}, torch.bfloat16)):
        model = WithBuffers()
        with engine_for(model, adamw, config_of(1, None, data_types=data_types, **BF16)) as engine:
            assert model.scale.dtype == expected
            assert (model.wide.dtype, model.count.dtype) == (torch.float32, torch.long)
            assert engine.train_batch(iter([(torch.ones(2, 4).bfloat16(),)])).isfinite()
    listed = {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["sca*"]}
    with engine_for(WithBuffers(), adamw, config_of(1, None, data_types=listed, **BF16)) as engine:
        assert (engine.module.scale.dtype, engine.module.wide.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_fp16_with_a_static_loss_scale(clip: float | None) -> None:
    groups = groups_of(LLAMA, 3, 4)
    plain = LLAMA.build(0.0)
    run = train_plainly_half(plain, groups, adamw, clip=clip, seed_of=seed_of, dtype=torch.float16, scale=128.0)
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, config_of(4, clip, fp16={"enabled": True, "loss_scale": 128})) as engine:
        assert engine.cur_scale == 128.0
        assert train_groups(engine, groups) == means_of(run.losses)
        assert engine.skipped_steps == 0
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()), bitwise=True)


def fp16(**settings: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "loss_scale": 0, **settings}}


@pytest.mark.parametrize("residency", ["off", 2, 100])
def test_fp16_goes_on_exactly_after_an_overflow(residency: Any) -> None:
    groups = groups_of(LLAMA, 2, 2)
    model = LLAMA.build(0.0)
    harmony = {"pack_layers": 1, "residency": residency}
    with engine_for(model, adamw, config_of(2, 0.5, harmony, **fp16(initial_scale_power=24, hysteresis=1))) as engine:
        before = weights_of(model)
        while not engine.was_step_applied():
            assert_same(weights_of(model), before, bitwise=True)
            assert not engine.optimizer.state
            scale = engine.cur_scale
            engine.train_batch(iter(groups[0]))
        skipped = engine.skipped_steps
        assert skipped > 0
        assert engine.cur_scale == scale == 2.0**24 / 2.0**skipped
        assert engine.get_global_grad_norm() > 0.0
    plain = LLAMA.build(0.0)
    train_plainly_half(plain, groups[:1], adamw, clip=0.5, seed_of=seed_of, dtype=torch.float16, scale=scale)
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()), bitwise=True)


ADAM = {"lr": 1e-3, "betas": [0.8, 0.99], "weight_decay": 0.1, "eps": 1e-5}


def by_name(type_: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"optimizer": {"type": type_, "params": params}, **more}


def as_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.8, 0.99), weight_decay=0.1, eps=1e-5)


@pytest.mark.parametrize(
    ("type_", "params", "reference", "made"),
    [
        ("AdamW", ADAM, as_adamw, "DeepSpeedCPUAdam"),
        ("AdamW", {**ADAM, "torch_adam": True}, as_adamw, "AdamW"),
        ("Adagrad", {"lr": 1e-2}, lambda p: torch.optim.Adagrad(p, lr=1e-2), "DeepSpeedCPUAdagrad"),
        ("RMSprop", {"lr": 1e-3, "eps": 1e-4}, lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4), "RMSprop"),
    ],
)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_optimizers_by_name_are_near_torchs_after_ten_steps(
    type_: str, params: dict[str, Any], reference: Any, made: str, clip: float | None
) -> None:
    groups, plain, model = groups_of(LLAMA, 10, 2), LLAMA.build(0.0), LLAMA.build(0.0)
    train_plainly(plain, groups, reference(plain.parameters()), clip=clip, seed_of=seed_of)
    with engine_for(model, None, config_of(2, clip, **by_name(type_, params))) as engine:
        assert type(engine.optimizer.optimizer).__name__ == made
        train_groups(engine, groups)
    assert_same(model, plain, bitwise=False, relative=1e-5)


def test_lion_by_name_steps_by_the_sign() -> None:
    model = LLAMA.build(0.0)
    before = copy.deepcopy(model)
    with engine_for(model, None, config_of(2, **by_name("Lion", {"lr": 1e-3, "betas": [0.9, 0.99]}))) as engine:
        train_groups(engine, groups_of(LLAMA, 1, 2))
    for now, then in zip(model.parameters(), before.parameters(), strict=True):
        assert ((now - then).abs() <= 1.001e-3).all()
        assert ((now - then).abs() >= 0.99e-3).float().mean() > 0.3


@pytest.mark.parametrize(("clip", "dtype", "gradient_bytes"), [(0.0, "fp32", None), (1.0, "fp32", 4), (1.0, "bf16", 2)])
def test_host_memory_of_bf16_with_adam(clip: float, dtype: str, gradient_bytes: int | None) -> None:
    more = {"data_types": {"grad_accum_dtype": dtype}, **BF16, **by_name("AdamW", {"lr": 1e-3})}
    model = LLAMA.build(0.0)
    with engine_for(model, None, config_of(4, clip, {"pack_layers": 1}, **more)) as engine:
        train_groups(engine, groups_of(LLAMA, 3, 4))
        host = engine.memory_report().host_bytes
    count = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    assert host["weights"] == sum(layer_bytes(model, 2))
    assert host["masters"] == 4 * count
    assert 8 * count <= host["optimizer"] <= 8 * count + 8 * tensors
    assert host["weights"] + host["masters"] + host["optimizer"] <= 14 * count + 72 * tensors
    if gradient_bytes is None:
        assert host["gradients"] <= 3 * max(layer_bytes(model, 4))
    else:
        assert host["gradients"] <= sum(layer_bytes(model, gradient_bytes))


class TwoInputs(nn.Module):
    """Notes the dtypes that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, ids: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        self.seen = [x.dtype, ids.dtype, scale.dtype]
        return self.last(self.first(x)).float().mul(scale).mean()


def test_auto_cast_makes_positional_inputs_half_and_leaves_the_others_as_deepspeed_does() -> None:
    model = TwoInputs()
    fp16 = {"fp16": {"enabled": True, "auto_cast": True, "loss_scale": 8}}
    given = (torch.ones(2, 4), torch.ones(2, dtype=torch.long))
    with engine_for(model, adamw, config_of(1, None, **fp16)) as engine:
        loss = engine(*given, scale=torch.ones(()))
        engine.backward(loss)
        engine.step()
        assert model.seen == [torch.float16, torch.int64, torch.float32]
        with torch.no_grad():
            engine(*given, scale=torch.ones(()))
        assert model.seen == [torch.float16, torch.int64, torch.float32]
    assert given[0].dtype == torch.float32


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuonWithAuxAdam

    own = list(parameters)
    groups = [
        {"params": [p for p in own if (p.ndim == 2) is matrices], "use_muon": matrices, "lr": 0.01}
        for matrices in (True, False)
    ]
    made: torch.optim.Optimizer = SingleDeviceMuonWithAuxAdam(groups)
    return made


@pytest.mark.parametrize("clip", [None, 0.5])
def test_muon_beside_adam(clip: float | None) -> None:
    groups = groups_of(LLAMA, 2, 3)
    with torch.compiler.set_stance("force_eager"):  # it compiles its iteration, for minutes
        plain = LLAMA.build(0.1)
        losses = train_plainly(plain, groups, muon(plain.parameters()), clip=clip, seed_of=seed_of)
        model = LLAMA.build(0.1)
        with engine_for(model, muon, config_of(3, clip, {"pack_layers": 1})) as engine:
            assert [engine.train_batch(iter(group)).item() for group in groups] == means_of(losses)
        assert_same(model, plain, bitwise=True)
