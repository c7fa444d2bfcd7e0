"""The engine on the late device: plain PyTorch's results and no report, however late copies are."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine
from harmony_ds.device import Device, DeviceGroup
from tests.cover import spread
from tests.engine.drive import (
    Groups,
    adamw,
    config_of,
    engine_for,
    family,
    groups_of,
    loop,
    means_of,
    optimizer_for,
    plain_model,
    plainly,
    seed_of,
    sgd,
    train_groups,
    weights_of,
)
from tests.engine.failing import Mishap, Trap, Trapped, trapped_llama, unwrapped
from tests.graphs import graphs_in, keep_graphs
from tests.inside import updater_of
from tests.oracle import assert_same, train_plainly
from tests.simdevice.late import LateSimDevice

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 3, 3)
SEEDS = [None, 1]
pytestmark = [
    pytest.mark.fixed_times,
    pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning"),
]


def late_devices(
    count: int, seed: int | None = None, budget_bytes: int | None = None, kind: Any = LateSimDevice
) -> Device:
    """So many of them, as one `Device`."""
    first = kind(seed, budget_bytes)
    others = [kind(seed, budget_bytes, beside=first) for _ in range(count - 1)]
    return DeviceGroup([first, *others]) if others else first


@contextmanager
def late_engine(
    model: nn.Module, config: dict[str, Any], seed: int | None = None, make: Any = adamw, device: Device | None = None
) -> Iterator[HarmonyEngine]:
    """Return an engine on a late device or a group; at the end destroy it and check that everything was in order."""
    device = device or LateSimDevice(seed)
    home = device.members[0] if isinstance(device, DeviceGroup) else device
    assert isinstance(home, LateSimDevice)
    with home.watched(), engine_for(model, make, config, device=device) as engine:
        updater_of(engine)._timed = lambda: home.watched(None)
        yield engine
    gc.collect()
    home.assert_in_order()


@dataclass(frozen=True)
class Setting:
    """Settings of a run."""

    harmony: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    looks: bool = False
    seed: int | None = None
    graphs: tuple[int, ...] = ()  # of how many micro-batches they are kept: of pack 0, 1, ..., and again from the front


SETTINGS = [
    Setting({"stash": "device"}, looks=True),
    Setting({"stash": "host"}, clip=0.5, looks=True, seed=2),
    Setting({"stash": "host", "residency": 2}, clip=0.5, seed=1),
]
KINDS = ("gpt2", "gemma4", "opt", "t5", "resnet", "mixtral", "clip", "mamba")
"""One of each kind for the order of copies: tied weights, code between layers that they share, layers that are left out,
two stacks, buffers, experts, two towers, no attention."""
ROWS = [
    *spread(KINDS, SETTINGS),
    # Packs of two share nothing with the layers' sizes.
    *(("llama", replace(setting, harmony={**setting.harmony, "pack_layers": 2})) for setting in SETTINGS),
    ("t5", Setting({"stash": "host"}, clip=0.5, looks=True, seed=2, graphs=(2, 0, 3))),
]


@pytest.mark.parametrize(("name", "setting"), ROWS)
def test_a_loop_trains_as_plain_pytorch(name: str, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting.graphs:
        keep_graphs(monkeypatch, setting.graphs)
    one = family(name)
    groups, make = groups_of(one, 2, 3), optimizer_for(one)
    plain, losses = plainly(one, 0.1, groups, make, setting.clip)
    model = one.build(0.1)
    config = config_of(3, setting.clip, {"pack_layers": 1, **setting.harmony})
    with late_engine(model, config, setting.seed, make) as engine:
        actual = means_of(loop(engine, groups, lambda i: setting.looks and i == 1))
        assert not setting.graphs or graphs_in(engine.plan)
    assert_same(model, plain, one.bitwise)
    assert actual == pytest.approx(means_of(losses), rel=0.0 if one.bitwise else 1e-6)


def test_logits_of_tiles_that_a_program_keeps_are_copied_to_memory_that_goes_with_them() -> None:
    kept: list[Tensor] = []
    with late_engine(LLAMA.build(0.0), config_of(3, 0.5, {"pack_layers": 1, "tokens": 8}), 1) as engine:
        for batch in (batch for group in GROUPS for batch in group):
            outputs = engine(**batch)
            engine.backward(outputs.loss)
            kept.append(outputs.logits)
            engine.step()
        assert kept[0].isfinite().all()
    # In the end no memory is page-locked, as `late_engine` checks.


# ---- failures in mid-step


@pytest.mark.parametrize(
    ("where", "at", "stash", "residency", "seed"),
    [("forward", 4, "device", 2, 1), ("backward", 0, "host", 2, None), ("backward", 1, "host", "off", 1)],
)
def test_after_a_failure_in_mid_step_all_memory_is_freed(
    where: str, at: int, stash: str, residency: Any, seed: int | None
) -> None:
    plain, _ = plainly(LLAMA, 0.1, GROUPS, adamw, 0.5)
    trap = Trap(at)
    model = trapped_llama(trap, where)
    config = config_of(3, 0.5, {"pack_layers": 1, "stash": stash, "residency": residency})
    with late_engine(model, config, seed) as engine:
        train_groups(engine, GROUPS[:1])
        trap.arm()
        with pytest.raises(Mishap):
            engine.train_batch(iter(GROUPS[1]))
        train_groups(engine, GROUPS[1:])
    assert_same(unwrapped(model), weights_of(plain), bitwise=True)


def test_an_engine_that_cannot_go_on_frees_all_memory_too() -> None:
    """Without clipping, late layers have been updated when an early one fails."""
    trap = Trap(1)
    config = config_of(3, None, {"pack_layers": 1, "stash": "host"})
    with late_engine(trapped_llama(trap, "backward"), config) as engine:
        train_groups(engine, GROUPS[:1])
        trap.arm()
        with pytest.raises(Mishap):
            engine.train_batch(iter(GROUPS[1]))
        assert not engine.usable


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_on_their_way_to_the_host_outlive_a_failure(seed: int | None) -> None:
    """The last micro-batch fails in the last pack but one: the last pack's gradients are just leaving."""
    trap = Trap(0)
    model = LLAMA.build(0.0)
    model.model.layers[-1].mlp = Trapped(model.model.layers[-1].mlp, trap, "backward")
    plain, _ = plainly(LLAMA, 0.0, GROUPS, adamw, 0.5)
    with late_engine(model, config_of(3, 0.5, {"pack_layers": 1, "stash": "host"}), seed) as engine:
        train_groups(engine, GROUPS[:1])
        engine.finish_updates()
        trap.arm()
        # The update thread waits for nothing that arrives until the failure has been dealt with.
        updater, dealt_with = updater_of(engine), threading.Event()

        def no_norms() -> dict[str, Tensor]:
            dealt_with.wait(60)
            return {}

        def discard() -> None:
            dealt_with.set()
            type(updater).discard(updater)

        updater.add_norms(no_norms)
        updater.discard = discard
        with pytest.raises(Mishap):
            engine.train_batch(iter(GROUPS[1]))
        train_groups(engine, GROUPS[1:])
    assert_same(unwrapped(model), weights_of(plain), bitwise=True)


# ---- looks at weights


def ema_around(evaluate: Callable[[nn.Module], Any], model: nn.Module, kept: list[Tensor]) -> None:
    """Evaluate with other weights, and restore the model's own as soon as that returns."""
    own = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), kept, strict=True):
            parameter.copy_(other)
        evaluate(model)
        for parameter, value in zip(model.parameters(), own, strict=True):
            parameter.copy_(value)


@pytest.mark.parametrize(("way", "residency", "seed"), [("eval_batch", "off", None), ("module", 2, 1)])
def test_weights_may_be_restored_right_after_an_evaluation(way: str, residency: Any, seed: int | None) -> None:
    batch = LLAMA.batch(9)
    plain, model = plain_model(LLAMA, 0.1), LLAMA.build(0.1)
    kept = [torch.full_like(p, 0.01) for p in plain.parameters()]
    optimizer = adamw(plain.parameters())
    seen: list[float] = []
    for step, group in enumerate(GROUPS):
        train_plainly(plain, [group], optimizer, clip=0.5, seed_of=lambda _, i, step=step: seed_of(step, i))
        plain.eval()
        ema_around(lambda m: seen.append(m(**batch).loss.item()), plain, kept)
        plain.train()
    found: list[Tensor] = []
    config = config_of(3, 0.5, {"pack_layers": 1, "residency": residency})
    device = LateSimDevice(seed)
    with late_engine(model, config, device=device) as engine:

        def evaluate(_: nn.Module) -> None:
            with device.watched():
                found.append(engine.eval_batch(iter([batch] * 3)) if way == "eval_batch" else engine(**batch).loss)

        for group in GROUPS:
            engine.train_batch(iter(group))
            engine.eval()
            with device.watched(None):
                ema_around(evaluate, engine.module, kept)
            engine.train()
        actual = [loss.item() for loss in found]
    assert_same(model, plain, bitwise=True)
    assert actual == pytest.approx(seen, rel=1e-6)


# ---- views of parameters


class Positions(nn.Module):
    """Returns a view of its parameter, as learned positions do; expanded, its rows lie on top of each other."""

    def __init__(self, expanded: bool) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.linspace(-1, 1, 8 * 4).reshape(8, 4))
        self.expanded = expanded

    def forward(self, rows: int) -> Tensor:
        return self.pos[:rows].expand(2, rows, 4) if self.expanded else self.pos[:rows]


class Positioned(nn.Module):
    """Recurrent layers keep their parameters in a list of their own."""

    def __init__(self, recurrent: bool = False, late: bool = False, expanded: bool = False) -> None:
        super().__init__()
        self.positions = Positions(expanded)
        self.blocks = nn.ModuleList(nn.RNN(4, 4, batch_first=True) if recurrent else nn.Linear(4, 4) for _ in range(3))
        self.late = late

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs if self.late else inputs + self.positions(inputs.shape[1])
        for block in self.blocks:
            out = block(hidden)
            hidden = torch.tanh(out) if isinstance(out, Tensor) else hidden + out[0]
        return (hidden * self.positions(inputs.shape[1]) if self.late else hidden).square().mean()


def inputs_of(steps: int) -> Groups:
    generator = torch.Generator().manual_seed(3)
    return [[{"inputs": torch.randn(2, 5, 4, generator=generator)} for _ in range(3)] for _ in range(steps)]


def built(**options: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Positioned(**options)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("options", "clip"),
    [({}, 0.5), ({"late": True}, None), ({"recurrent": True}, 0.5), ({"expanded": True}, None)],
    ids=["first", "last", "recurrent", "expanded"],
)
def test_results_in_parameter_memory_do_not_hold_evicted_memory(
    options: dict[str, bool], clip: float | None, seed: int | None
) -> None:
    plain, model, groups = built(**options), built(**options), inputs_of(3)
    losses = train_plainly(plain, groups, sgd(plain.parameters()), clip=clip, seed_of=seed_of)
    with late_engine(model, config_of(3, clip, {"pack_layers": 1, "stash": "host"}), seed, sgd) as engine:
        actual = train_groups(engine, groups)
        # The CPU's own kernel of a whole recurrent layer adds in another order than the operations that it stands for.
        assert actual == pytest.approx(means_of(losses), rel=1e-6 if "recurrent" in options else 0.0)
        engine.eval()
        with torch.no_grad():
            view = engine.module.positions(5)
            expected = plain.positions(5).clone()
            engine(inputs=groups[0][0]["inputs"])
            assert torch.equal(view, expected)
            assert view.stride() == plain.positions(5).stride()
    assert_same(model, plain, bitwise="recurrent" not in options)


# ---- slices, lengths


def test_slices() -> None:
    """Bits may differ from uncut calls (sums are rounded elsewhere): compared with the same plan on the CPU device."""
    config = config_of(3, 0.5, {"pack_layers": 1, "stash": "host", "micro_batch": 1})
    models = [LLAMA.build(0.0) for _ in range(2)]
    with late_engine(models[0], config, 1) as engine:
        train_groups(engine, GROUPS)
    with engine_for(models[1], adamw, config) as engine:
        train_groups(engine, GROUPS)
    assert_same(models[0], models[1], bitwise=True)


def test_after_some_steps_nothing_more_is_page_locked_for_lengths_that_vary() -> None:
    lengths = [5, 12, 3, 9, 12, 7, 4, 11, 6, 12, 8, 10]
    generator = torch.Generator().manual_seed(2)
    harmony = {"pack_layers": 1, "stash": "host", "residency": 1}
    config, device = config_of(2, 0.5, harmony), LateSimDevice(1)
    with late_engine(LLAMA.build(0.0), config, device=device) as engine:
        known: list[set[int]] = []
        for length in [12, *lengths]:
            ids = torch.randint(0, 96, (2, length), generator=generator)
            engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * 2))
            known.append(set(device.late.registered))
    assert all(later == known[0] for later in known[1:])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_calls_of_several_micro_batches(seed: int | None, clip: float | None) -> None:
    """Inputs that all rows share are compared on the device, and the result is read before gradients are used."""
    groups = [[group[0]] * 4 for group in GROUPS]
    plain, losses = plainly(LLAMA, 0.0, groups, sgd, clip)
    model = LLAMA.build(0.0)
    config = config_of(4, clip, {"pack_layers": 1, "stash": "host", "micro_batch": 64})
    with late_engine(model, config, seed, sgd) as engine:
        found = train_groups(engine, groups)
        assert engine.plan is not None
        assert engine.plan.policy.joined_count == 4
    assert found == pytest.approx(means_of(losses), rel=1e-5)
    assert_same(weights_of(model), weights_of(plain), bitwise=False)


# ---- inputs that layers keep


class Keeping(nn.Module):
    """A layer that keeps its input, which in a backward pass came back from the host."""

    kept: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return x + torch.tanh(self.linear(x))


class Keepers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeping() for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.square().mean()


@pytest.mark.parametrize("seed", SEEDS)
def test_an_input_that_a_layer_keeps_may_be_used_after_the_step(seed: int | None) -> None:
    groups = inputs_of(4)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: Any = Keepers()
    seen: list[Tensor] = []
    with late_engine(model, config_of(3, 0.5, {"pack_layers": 1, "stash": "host"}), seed, sgd) as engine:
        for group in groups:
            engine.train_batch(iter(group))
            for layer in model.layers:
                seen.append(layer.kept.detach().sum())  # a kernel, which nobody waits for
                layer.kept = None
    assert torch.stack(seen).isfinite().all()


class Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = super().forward(inputs)
        return made.square().mean()


def test_updates_from_gradients_that_were_read_wait_for_forward_passes_that_ran_alone() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: Any = Chain()
        # Not parts of one tensor: a matrix product's last bit may depend on where its operands begin in memory.
        first, second = torch.randn(3, 6), torch.randn(3, 6)
    expected = model(second).item()
    with late_engine(model, config_of(2, None, {"pack_layers": 2}), make=sgd) as engine:
        held = engine(second)  # still there at the step, and not propagated back from
        for number in range(2):
            engine.backward(engine(first))
            assert number == 0 or all(parameter.grad is not None for parameter in model.parameters())
            engine.step()
        assert held.item() == expected
