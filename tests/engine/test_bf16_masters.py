"""Masters in bf16: the weights are what the optimizer steps, as with DeepSpeed's `bf16_master_weights_and_grads`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor, nn

from harmony_ds.errors import OptimizerError
from harmony_ds.offload.native import gil_free_op
from harmony_ds.scheduler.host_room import gradient_bytes
from harmony_ds.utils import safe_get_full_fp32_param
from tests.checkpoint.runs import Setup, assert_equal, state_of, train_and_resume
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, loop, seed_of, train_groups
from tests.inside import updater_of
from tests.oracle import assert_same, train_plainly

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}


def settings(states: bool = True, **optimizer: Any) -> dict[str, Any]:
    return {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": states},
        "zero_optimization": {"stage": 2},
        "optimizer": optimizer or ADAM,
    }


def plain_adam(model: nn.Module, states: bool) -> DeepSpeedCPUAdam:
    """DeepSpeed's optimizer over bf16 parameters; its op computes the powers of the betas as the engine's does."""
    optimizer = DeepSpeedCPUAdam(model.parameters(), **ADAM["params"], fp32_optimizer_states=not states)
    setattr(optimizer, *gil_free_op(optimizer))
    return optimizer


def clip_in_fp32(model: nn.Module, clip: float) -> None:
    """Clip as DeepSpeed does; torch's clip_grad_norm_ rounds the norm of bf16 gradients to bf16."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g, 2, dtype=torch.float32) for g in gradients])
    )
    for gradient in gradients:
        gradient.mul_(torch.clamp(clip / (norm + 1e-6), max=1.0).item())


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_weights_are_those_of_plain_accumulation_in_bf16(clip: float | None, states: bool) -> None:
    groups = groups_of(LLAMA, 4, 3)
    plain = LLAMA.build(0.1)
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()
    optimizer = plain_adam(plain, states)
    if clip is not None:
        optimizer.register_step_pre_hook(lambda *_: clip_in_fp32(plain, clip))
    train_plainly(plain, groups, optimizer, clip=None, seed_of=seed_of)
    model = LLAMA.build(0.1)
    with engine_for(model, None, config_of(3, clip, {"pack_layers": 2}, **settings(states))) as engine:
        loop(engine, groups)
        kept = {
            value.dtype
            for state in engine.optimizer.state.values()
            for value in state.values()
            if hasattr(value, "dtype")
        }
    assert kept == {torch.bfloat16 if states else torch.float32}
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize(("states", "numbers"), [(True, 6), (False, 10)])
def test_the_host_holds_as_many_bytes_as_the_dtypes_say(states: bool, numbers: int) -> None:
    model = LLAMA.build(0.0)
    count = sum(parameter.numel() for parameter in model.parameters())
    with engine_for(model, None, config_of(2, None, {"pack_layers": 1}, **settings(states))) as engine:
        train_groups(engine, groups_of(LLAMA, 2, 2))
        held = engine.memory_report().host_bytes
    assert held["masters"] == 0
    assert held["weights"] + held["optimizer"] == pytest.approx(numbers * count, rel=0.02)  # slabs are aligned
    assert held["gradients"] <= 2 * count


class Stack(nn.Module):
    """Thirteen layers, of which the last twelve make two large packs, and a parameter that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(13))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (self.scale * x).float().square().mean()


FORMS: dict[str, dict[str, Any]] = {
    "16-bit state": settings(),
    "bf16": {"bf16": {"enabled": True}},
    "bf16 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "fp32": {},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pack_layers", [1, 6, 100])
def test_gradients_that_do_not_wait_take_no_more_of_the_host_than_those_that_do(form: str, pack_layers: int) -> None:
    """And as much as the planner says."""
    held = []
    for clip in (None, 1.0):
        model = Stack() if form == "fp32" else Stack().bfloat16()
        make = None if "optimizer" in FORMS[form] else adamw
        with engine_for(model, make, config_of(2, clip, {"pack_layers": pack_layers}, **FORMS[form])) as engine:
            dtype = next(model.parameters()).dtype
            for _ in range(2):
                engine.train_batch([(torch.ones(2, 64, dtype=dtype),)] * 2)
            assert engine.plan is not None
            held.append(engine.memory_report().host_bytes["gradients"])
            assert held[-1] == gradient_bytes(engine.plan.packing, engine.plan.policy)
    assert held[0] <= held[1]


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("split", [False, True])
def test_gradients_are_cast_for_the_optimizer_in_one_buffer_that_is_counted(clip: float | None, split: bool) -> None:
    """All in the memory of the largest parameter's, or of a few MiB where there are many small ones."""
    config = config_of(2, clip, {"pack_layers": 6, "split_masters": split}, **FORMS["bf16 sums"])
    used, elements = set(), 13 * (64 * 64 + 64) + 64
    with engine_for(Stack().bfloat16(), adamw, config) as engine:
        optimizer = updater_of(engine)._optimizer
        stepping = optimizer.step

        def step(gradients: dict[str, Tensor], hyper: Any) -> None:
            used.update((one.dtype, one.untyped_storage().data_ptr()) for one in gradients.values())
            stepping(gradients, hyper)

        optimizer.step = step
        for _ in range(2):
            engine.train_batch([(torch.ones(2, 64, dtype=torch.bfloat16),)] * 2)
        held = engine.memory_report().host_bytes["casts"]
    assert [dtype for dtype, _ in used] == [torch.float32]  # in one place
    assert 4 * elements <= held <= 4 * (elements + 27 * 128)  # slabs are aligned


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    setup = Setup(optimizer=None, config=settings())
    assert_equal(*train_and_resume(setup, setup, tmp_path, state_of))


def test_reading_and_writing_by_hand_is_in_fp32() -> None:
    model = LLAMA.build(0.0)
    with engine_for(model, None, config_of(1, **settings())) as engine:
        parameter = next(engine.module.parameters())
        with torch.no_grad():
            parameter.fill_(0.5)
        found = safe_get_full_fp32_param(parameter)
        assert found is not None and found.dtype == torch.float32 and torch.equal(found, torch.full_like(found, 0.5))
        train_groups(engine, groups_of(LLAMA, 1, 1))
        assert not torch.equal(safe_get_full_fp32_param(parameter), found)


@pytest.mark.parametrize("made", [adamw, DeepSpeedCPUAdam])
def test_an_optimizer_that_keeps_other_dtypes_is_refused_by_name(made: Any) -> None:
    config = config_of(1, **settings())
    del config["optimizer"]
    with (
        pytest.raises(OptimizerError, match=r"AdamW|fp32_optimizer_states=True"),
        engine_for(LLAMA.build(0.0), made, config),
    ):
        pass
