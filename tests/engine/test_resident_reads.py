"""What a program reads of resident packs moves once, and what it writes goes back; nothing else does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine, utils
from harmony_ds.offload.ledger import TrafficKind
from tests.engine.drive import adamw, config_of, engine_for, random_rows, seed_of
from tests.engine.test_precision import BF16
from tests.inside import assembly_of
from tests.oracle import assert_same, train_plainly

pytestmark = pytest.mark.fixed_times

MATRIX, LAYER = 65_536, 66_048
"""Bytes of a layer's matrix, and of the layer."""
RESIDENT = 6
NORMS = 4 * 2 * RESIDENT
"""Bytes of the norms that a step sends to the host."""


class Blocks(nn.Module):
    """Eight layers of 66,048 bytes, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128)) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def blocks() -> Any:
    torch.manual_seed(3)
    return Blocks()


def group(step: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    inputs = random_rows(step, 2, 2, 128)
    return [{"x": one.to(dtype)} for one in inputs]


def engine_over(model: Any, residency: Any = RESIDENT, **more: Any) -> AbstractContextManager[HarmonyEngine]:
    """Return the context of an engine, in which the last layers are resident."""
    return engine_for(model, adamw, config_of(2, 0.5, {"pack_layers": 1, "residency": residency}, **more))


def moved(engine: HarmonyEngine) -> tuple[int, int]:
    """Return the bytes of resident packs that were moved to the device and from it since this was asked before."""
    traffic = assembly_of(engine).ledger.drain()
    return traffic.host_to_device[TrafficKind.RESIDENT], traffic.device_to_host[TrafficKind.RESIDENT]


# ---- reads

Read = Callable[[Any, Any], Any]
READS: dict[str, tuple[Read, int]] = {
    "norm": (lambda model, one: one.norm(), MATRIX),
    "layer": (lambda model, one: [p.norm() for p in model.blocks[7].parameters()], LAYER),
    "all": (lambda model, one: [p.norm() for p in model.parameters()], RESIDENT * LAYER),
    "list": (lambda model, one: torch._foreach_norm([one, model.blocks[7][0].bias]), LAYER),
    "data": (lambda model, one: one.data.norm(), MATRIX),
    "array": (lambda model, one: one.detach().numpy().sum(), MATRIX),
    "state dict": (lambda model, one: model.state_dict(), RESIDENT * LAYER),
    "copy": (lambda model, one: copy.deepcopy(model.blocks[7]), LAYER),
    "master": (lambda model, one: utils.safe_get_full_fp32_param(one), MATRIX),
    "optimizer state": (lambda model, one: utils.safe_get_full_optimizer_state(one, "exp_avg"), 2 * MATRIX),
    "gradient": (lambda model, one: one.grad, 0),
    "gradient set": (lambda model, one: setattr(one, "grad", None), 0),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_moves_what_is_read_once_after_an_update_and_nothing_back(name: str) -> None:
    read, nbytes = READS[name]
    plain, model = blocks(), blocks()
    optimizer = adamw(plain.parameters())
    with engine_over(model) as engine:
        for step in range(3):
            train_plainly(plain, [group(step)], optimizer, clip=0.5, seed_of=seed_of)
            engine.train_batch(group(step))
            report = engine.swap_report()
            assert step == 0 or report.host_to_device["resident"] == 0
            assert report.device_to_host["resident"] == NORMS
            for expected in (nbytes, 0):
                read(model, model.blocks[7][0].weight)
                assert moved(engine) == (0, expected)
    assert_same(model, plain, bitwise=True)


def test_the_next_steps_report_has_what_was_read() -> None:
    model = blocks()
    with engine_over(model) as engine:
        for step in range(3):
            engine.train_batch(group(step))
            report = engine.swap_report()
            for parameter in model.blocks[7].parameters():
                parameter.norm()
    assert report.host_to_device["resident"] == 0
    assert report.device_to_host["resident"] == LAYER + NORMS


def test_a_read_of_a_weight_leaves_its_master_on_the_device() -> None:
    model = blocks().bfloat16()
    with engine_over(model, **BF16) as engine:
        for step in range(2):
            engine.train_batch(group(step, torch.bfloat16))
            moved(engine)
            model.blocks[7][0].weight.data.norm()
            assert moved(engine) == (0, MATRIX // 2)
            assert utils.safe_get_full_fp32_param(model.blocks[7][0].weight) is not None
            assert moved(engine) == (0, MATRIX)


def test_the_weight_that_two_layers_share_is_read_once() -> None:
    model = blocks()
    model.blocks[6][0].weight = model.blocks[7][0].weight
    with engine_over(model) as engine:
        for step in range(2):
            engine.train_batch(group(step))
            moved(engine)
            for number in (6, 7):
                model.blocks[number][0].weight.norm()
            assert moved(engine) == (0, MATRIX)


# ---- writes


@torch.library.custom_op("harmony_tests::halve", mutates_args=("target",))
def halve(factor: float, target: Tensor) -> None:
    """Write into an argument that is not the first, and by a name that does not say so."""
    target.mul_(factor)


@torch.no_grad()
def by_operator(engine: Any, one: Any) -> None:
    halve(0.5, one)


@torch.no_grad()
def in_place(engine: Any, one: Any) -> None:
    one.mul_(0.5)


def by_data(engine: Any, one: Any) -> None:
    one.data.mul_(0.5)


def in_inference_mode(engine: Any, one: Any) -> None:
    with torch.inference_mode():
        one.data.mul_(0.5)


def by_array(engine: Any, one: Any) -> None:
    array: Any = one.detach().view(torch.int16).numpy()  # which has no bf16
    array[3] = array[4]


def by_memory(engine: Any, one: Any) -> None:
    one.untyped_storage()[0] = 1


def by_assignment(engine: Any, one: Any) -> None:
    one.data = one.data * 0.5


def by_state_dict(engine: Any, one: Any) -> None:
    engine.module.state_dict()["blocks.7.0.weight"].data.mul_(0.5)


def by_loading(engine: Any, one: Any) -> None:
    state = engine.module.state_dict()
    engine.module.load_state_dict({name: 0.5 * value for name, value in state.items()})


def by_master(engine: Any, one: Any) -> None:
    master = utils.safe_get_full_fp32_param(one)
    assert master is not None
    utils.safe_set_full_fp32_param(one, master + 1e-4)


def by_state(engine: Any, one: Any) -> None:
    state = utils.safe_get_full_optimizer_state(one, "exp_avg")
    utils.safe_set_full_optimizer_state(one, 0.5 * state, "exp_avg")


def by_raw_state(engine: Any, one: Any) -> None:
    state = engine.optimizer.state[engine.optimizer.param_groups[0]["params"][-2]]
    state["exp_avg"].data.zero_()
    state["exp_avg_sq"] = torch.ones_like(state["exp_avg_sq"])


def by_loading_state(engine: Any, one: Any) -> None:
    state = copy.deepcopy(engine.optimizer.state_dict())
    for values in state["state"].values():
        values["exp_avg"].mul_(0.5)
    engine.optimizer.load_state_dict(state)


WRITES = [
    *(by_operator, in_place, by_data, in_inference_mode, by_array, by_memory, by_assignment, by_state_dict, by_loading),
    *(by_master, by_state, by_raw_state, by_loading_state),
]


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_counts_as_if_no_pack_were_resident(write: Callable[[Any, Any], None], half: bool) -> None:
    """In forward passes without gradients and in steps, also where a read came before it."""
    dtype, more = (torch.bfloat16, BF16) if half else (torch.float32, {})
    models, losses = [], []
    for residency in ("off", RESIDENT):
        model = blocks().to(dtype)
        with engine_over(model, residency, **more) as engine:
            for step in range(4):
                losses.append(engine.train_batch(group(step, dtype)).item())
                weight = model.blocks[7][0].weight
                if step % 2:
                    weight.norm()
                write(engine, weight)
                with torch.no_grad():
                    losses.append(engine(**group(9, dtype)[0]).item())
            losses.append(engine.train_batch(group(4, dtype)).item())
        models.append(model)
    assert losses[:9] == losses[9:]
    assert_same(models[1], models[0], bitwise=True)


@pytest.mark.parametrize("write", [in_place, by_data, by_array, by_state_dict])
def test_what_is_written_goes_back_alone(write: Callable[[Any, Any], None]) -> None:
    model = blocks()
    with engine_over(model) as engine:
        for step in range(3):
            engine.train_batch(group(step))
            report = engine.swap_report()
            assert step == 0 or report.host_to_device["resident"] == MATRIX
            write(engine, model.blocks[7][0].weight)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_kept_tensor_shows_each_update_and_can_be_written_at_any_time(half: bool) -> None:
    dtype, more = (torch.bfloat16, BF16) if half else (torch.float32, {})
    models, seen = [], []
    for residency in ("off", RESIDENT):
        model = blocks().to(dtype)
        with engine_over(model, residency, **more) as engine:
            kept = model.blocks[7][0].weight.data
            for step in range(4):
                engine.train_batch(group(step, dtype))
                seen.append(kept.sum().item())
                if step == 1:
                    engine.offload_states()
                    engine.eval_batch(group(9, dtype))
                if step > 0:
                    kept[0] = 0.25
                    seen.append(engine.eval_batch(group(9, dtype)).item())
        models.append(model)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert_same(models[1], models[0], bitwise=True)
