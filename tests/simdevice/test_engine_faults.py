"""A fault on any device, in any kind of task: its error is raised, nothing is lost, and the next step is right."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harmony_ds import HarmonyEngine
from harmony_ds.device import Stream
from harmony_ds.scheduler.plan import Task, TaskKind
from tests.engine.drive import Groups, adamw, config_of, engine_for, lanes, train_groups, weights_of
from tests.engine.failing import BackwardTrap, Mishap, Trap, Trapped
from tests.engine.test_pipeline import Trained, assert_equal
from tests.inside import assembly_of
from tests.simdevice.late import LateSimDevice
from tests.simdevice.test_engine_late import late_devices, late_engine
from tests.simdevice.test_engine_steady import Model

pytestmark = pytest.mark.fixed_times

DEVICES = 3
K = TaskKind
STREAMS = {
    **{K.SWAP_IN: Stream.SWAP_IN, K.STASH_IN: Stream.SWAP_IN, K.SWAP_OUT: Stream.SWAP_OUT},
    **{K.STASH_OUT: Stream.SWAP_OUT, K.MOVE: Stream.PEER, K.MOVE_BACK: Stream.PEER},
}
"""What copies."""
COMPUTING = (K.FORWARD, K.BACKWARD, K.FUSED)
WHERE = [
    *product(STREAMS, ("before the copy", "after the copy")),
    *product(COMPUTING, ("forward", "memory")),
    *((kind, "backward") for kind in (K.BACKWARD, K.FUSED)),
    *((kind, "begin") for kind in (*STREAMS, K.FORWARD, K.BACKWARD, K.EVICT, K.FREE_GRADIENTS)),
    (K.SWAP_IN, "memory"),
]


class Fault:
    """Comes up once, at the place `where` in a task of a kind on a device: in the first that gets there."""

    def __init__(self, kind: TaskKind, where: str) -> None:
        self.kind, self.where = kind, where
        self.error = torch.OutOfMemoryError("none left") if where == "memory" else Mishap(where)
        self.inside, self.sprung = False, False
        self.traps = {way: Trap(0, self.error) for way in ("forward", "backward")}
        way = "forward" if where == "memory" else where
        self.armed = [self.traps[way]] if way in self.traps and kind in COMPUTING else []

    def watch(self, engine: HarmonyEngine, device: int, passed: int) -> None:
        """Has it come up in a task on `device`, but for the first `passed` ones. The embedding has no traps."""
        handlers = assembly_of(engine).executor._handlers
        handle, left = handlers[self.kind], [passed]

        def handler(task: Task) -> None:
            left[0] -= engine.plan.packs[task.pack].device == device and (task.pack > 0 or self.kind not in COMPUTING)
            if left[0] >= 0 or self.sprung or engine.plan.packs[task.pack].device != device:
                return handle(task)
            self.inside = True
            for trap in self.armed:
                trap.arm()
            try:
                self.at("begin")
                return handle(task)
            finally:
                self.inside, self.sprung = False, sys.exc_info()[1] is not None
                for trap in self.armed:
                    trap.left = None

        handlers[self.kind] = handler

    def at(self, where: str, stream: Stream | None = None) -> None:
        if self.inside and not self.sprung and self.where == where and stream in (None, STREAMS.get(self.kind)):
            self.sprung = True
            raise self.error


class FaultyDevice(LateSimDevice):
    fault: Fault

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.fault.at("before the copy", stream)
        with super().on(stream):
            yield
            self.fault.at("after the copy", stream)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self.fault.kind is K.SWAP_IN:
            self.fault.at("memory")
        return super().empty(numel, dtype)


class Head(nn.Module):
    """The last layer, which calls the trap within its forward."""

    def __init__(self, weight: nn.Parameter, fault: Fault) -> None:
        super().__init__()
        self.weight, self.fault = weight, fault

    def forward(self, hidden: Tensor) -> Tensor:
        self.fault.traps["forward"].spring()
        return F.linear(BackwardTrap.apply(hidden, self.fault.traps["backward"]), self.weight)


def build(fault: Fault) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Model(layers=5)
    for block in model.blocks:
        for way, trap in fault.traps.items():
            block.up = Trapped(block.up, trap, way)
    model.head = Head(model.head.weight, fault)
    return model


def batches() -> Groups:
    source = torch.Generator().manual_seed(2)
    return [[{"ids": torch.randint(0, 32, (2, 5), generator=source)} for _ in range(4)] for _ in range(3)]


CONFIG: dict[str, Any] = {"pack_layers": 1, "stash": "host"}


@cache
def undisturbed() -> Trained:
    model = build(Fault(K.FORWARD, "never"))
    with engine_for(model, adamw, config_of(4, 0.5, CONFIG)) as engine:
        losses = train_groups(engine, batches())
    return weights_of(model), losses


def state_of(engine: HarmonyEngine, devices: Any) -> Any:
    """Return what a failed step must not change: weights, optimizer state, device tensors and host buffers."""
    parts = assembly_of(engine).runtime
    engine.finish_updates()
    gc.collect()
    state = {f"{i} {k}": v.clone() for i, s in enumerate(engine.optimizer.state.values()) for k, v in s.items()}
    held = [device.allocated_bytes() for device in devices]
    stash = parts.stash._buffers
    asked = stash._asked_bytes - sum(buffer.asked for buffer in stash._dropped)
    return {**weights_of(engine.module), **state}, (held, asked, parts.host_gradients._buffers_in_use)


@pytest.mark.parametrize(
    ("where", "device"), [(w, d) for w in WHERE for d in range(DEVICES) if w[0] is not K.FUSED or d == 0], ids=str
)
def test_a_failed_step_changes_nothing(where: tuple[TaskKind, str], device: int) -> None:
    kind, place = where
    FaultyDevice.fault = fault = Fault(kind, place)
    group, model = late_devices(DEVICES, seed=device, kind=FaultyDevice), build(fault)
    groups = batches()
    with late_engine(model, config_of(4, 0.5, CONFIG), device=group) as engine:
        losses = train_groups(engine, groups[:1])
        before, held = state_of(engine, group.members)
        packs = [task.pack for task in engine.plan.tasks if task.kind is kind and (task.pack or kind not in COMPUTING)]
        count = sum(engine.plan.packs[pack].device == device for pack in packs)
        fault.watch(engine, device, passed=(len(place) * 7 + device) % count)
        with pytest.raises(type(fault.error)) as caught:
            engine.train_batch(iter(groups[1]))
        assert caught.value is fault.error
        fault.error.__traceback__ = None  # whose frames hold what the step had
        del caught
        assert lanes() == [] and engine.usable
        after, still_held = state_of(engine, group.members)
        assert still_held == held
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        losses += train_groups(engine, groups[1:])
    assert_equal((weights_of(model), losses), undisturbed())
