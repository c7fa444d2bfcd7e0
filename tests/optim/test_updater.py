"""The update thread: order of updates, exact norms, failures that are raised, no deadlocks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.offload.host_gradients import GradientTransfer, HostGradients
from harmony_ds.offload.ledger import Ledger
from harmony_ds.optim.cores import computing_with, update_threads
from harmony_ds.optim.host_optimizer import HostOptimizer, Hyper
from harmony_ds.optim.updater import NormOptions, Updater
from tests.offload.examples import Stored, gradients_for, odd_sizes, stored

PACKS = {pack: (f"{pack}.weight", f"{pack}.bias") for pack in range(3)}


class RecordingOptimizer(HostOptimizer):
    """Records its steps; waits before each until `gate` is set; `before` may fail."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(optimizer, masters)
        self.stepped: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.before: Callable[[], Any] = lambda: None

    def step(self, gradients: Mapping[str, Tensor], hyper: Hyper) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        self.before()
        self.stepped += gradients
        super().step(gradients, hyper)


class UpdaterSetup:
    """A stored model with its updater, gradients and optimizer."""

    def __init__(self, one: Stored, limit: int | None) -> None:
        self.one = one
        self.parameters = one.store.parameters
        self.optimizer = RecordingOptimizer(
            torch.optim.SGD(list(one.store.masters.values()), lr=0.5), one.store.masters
        )
        self.gradients = HostGradients(one.device, Ledger(), torch.float32, limit, self.optimizer.trains)
        self.updater = Updater(one.store, self.optimizer, self.gradients)

    def deliver(self, pack: int, gradients: dict[str, Tensor]) -> None:
        mine = {name: gradients[name] for name in PACKS[pack] if name in gradients}
        self.updater.deposit(self.gradients.swap_out(mine, extra=0))

    def update(self, pack: int, norm: Any = None) -> None:
        self.updater.update(pack, PACKS[pack], self.optimizer.hyper(), norm)


@contextmanager
def bench(dtype: torch.dtype = torch.float32, limit: int | None = None) -> Iterator[UpdaterSetup]:
    made = UpdaterSetup(stored(odd_sizes(), dtype), limit)
    try:
        yield made
    finally:
        made.optimizer.gate.set()
        made.updater.stop()


def random_gradients(seed: int = 0) -> dict[str, Tensor]:
    named = dict(odd_sizes().named_parameters())
    return gradients_for(named, seed)


def stepped_plainly(gradients: dict[str, Tensor], max_norm: float = 0.0) -> tuple[nn.Module, float]:
    model = odd_sizes()
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf")).item()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return model, total


def assert_equal(actual: dict[str, nn.Parameter], expected: nn.Module) -> None:
    for name, parameter in expected.named_parameters():
        assert torch.equal(actual[name], parameter), name


def test_a_norm_belongs_to_its_step_however_late_the_thread_is() -> None:
    gradients = random_gradients()
    with bench() as b:
        b.optimizer.gate.clear()
        norms = []
        for pack in (2, 0):  # of two steps: the second one's comes first in the model
            b.deliver(pack, gradients)
            b.update(pack)
            norms.append(b.updater.norm_of_updates())
        b.optimizer.gate.set()
        for pack, norm in zip((2, 0), norms, strict=True):
            total = nn.utils.get_total_norm([gradients[name] for name in PACKS[pack]]).item()
            assert norm.result(30).total == pytest.approx(total)


def test_waiting_for_a_pack_waits_for_no_later_one() -> None:
    gradients = random_gradients()
    with bench() as b:
        for pack in (0, 1):
            b.deliver(pack, gradients)
        b.update(0)
        b.updater.wait(0)
        b.optimizer.gate.clear()
        b.update(1)
        b.updater.wait(0)
        assert b.optimizer.stepped == list(PACKS[0])


class Arrival:
    """An event that the host passes once it has waited for it: copies that are late arrive then."""

    def __init__(self, arrive: Callable[[], object]) -> None:
        self._arrive = arrive

    def synchronize(self) -> None:
        self._arrive()

    def query(self) -> bool:
        return True


class Summand(Tensor):
    """A gradient that has `meanwhile` run once, while another one is being added to it."""

    meanwhile: Callable[[], object]

    def add_(self, *given: Any, **named: Any) -> Any:
        first, self.meanwhile = self.meanwhile, lambda: None
        first()
        return super().add_(*given, **named)


def test_gradients_that_come_during_a_sum_are_waited_for_before_they_are_added() -> None:
    late = torch.full((6,), torch.nan)
    with bench() as b:

        def receive(gradient: Tensor, arrive: Callable[[], object] = lambda: None) -> None:
            b.updater.deposit(GradientTransfer({"1.bias": gradient}, Arrival(arrive), None))

        first = torch.ones(6).as_subclass(Summand)
        first.meanwhile = lambda: receive(late, lambda: late.fill_(4.0))
        receive(first)
        receive(torch.full((6,), 2.0))
        b.updater.wait_all()
        total = b.updater.gradient("1.bias")
    assert total is not None and torch.equal(total.as_subclass(Tensor), torch.full((6,), 7.0))


def test_gradients_that_come_before_an_update_has_run_are_for_the_next_one() -> None:
    """Those of parameters that no layer uses: nothing waits for their update before the next step's."""
    with bench() as b:
        weight = b.parameters["0.weight"].detach()
        before = weight.clone()
        b.optimizer.gate.clear()
        for pack, value in ((1, 1.0), (0, 1.0), (0, 2.0)):
            b.deliver(pack, {name: torch.full_like(b.parameters[name], value) for name in PACKS[pack]})
            b.update(pack)
            b.updater.norm_of_updates()
        b.optimizer.gate.set()
        b.updater.wait_all()
        assert b.optimizer.stepped == [*PACKS[1], *PACKS[0], *PACKS[0]]
        assert torch.equal(weight, before - 0.5 - 1.0)


@pytest.mark.parametrize(("max_norm", "scale"), [(0.1, 1.0), (1.0, 1.0), (1e6, 1.0), (0.0, 8.0), (0.1, 8.0)])
def test_deferred_updates_clip_as_torch_does_bit_for_bit(max_norm: float, scale: float) -> None:
    gradients = random_gradients()
    with bench() as b:
        for pack in (2, 1, 0):
            b.deliver(pack, {name: scale * gradient for name, gradient in gradients.items()})
            b.updater.compute_norms(PACKS[pack])
        norm = b.updater.norm(NormOptions(max_norm=max_norm, loss_scale=scale))
        for pack in (0, 1, 2):
            b.update(pack, norm)
        b.updater.wait_all()
        plain, total = stepped_plainly(gradients, max_norm)
        assert norm.result().total == total
        assert not norm.result().overflow
        assert_equal(b.parameters, plain)
        assert b.optimizer.stepped == [*PACKS[0], *PACKS[1], *PACKS[2]]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_overflow_is_found_and_its_gradients_can_be_dropped(value: float) -> None:
    gradients = random_gradients()
    gradients["1.bias"][0] = value
    with bench() as b:
        for pack in (2, 1, 0):
            b.deliver(pack, gradients)
            b.updater.compute_norms(PACKS[pack])
        assert b.updater.norm(NormOptions(max_norm=1.0, skip_overflow=True)).result(30).overflow
        b.updater.discard()
        b.update(0)
        b.updater.wait_all()
        assert b.optimizer.stepped == []
        assert_equal(b.parameters, odd_sizes())


def test_in_bf16_the_parameters_follow_their_masters() -> None:
    gradients = random_gradients()
    with bench(torch.bfloat16) as b:
        for pack in (2, 1, 0):
            b.deliver(pack, gradients)
            b.update(pack)
        b.updater.wait_all()
        assert_equal(b.one.store.masters, stepped_plainly(gradients)[0])
        for name, master in b.one.store.masters.items():
            assert torch.equal(b.parameters[name], master.bfloat16())


class NoLuckError(Exception):
    pass


def failing() -> None:
    raise NoLuckError("on the thread")


@pytest.mark.parametrize("wait", [lambda updater: updater.wait(0), Updater.wait_all], ids=["wait", "wait_all"])
def test_a_failure_on_the_thread_is_raised_as_itself(wait: Callable[[Updater], None]) -> None:
    with bench() as b:
        b.optimizer.before = failing
        b.deliver(0, random_gradients())
        b.update(0)
        with pytest.raises(NoLuckError, match="on the thread"):
            wait(b.updater)
        assert isinstance(b.updater.failure, NoLuckError)
        with pytest.raises(NoLuckError):
            b.update(1)


def test_after_a_failure_nothing_hangs_and_later_jobs_fail() -> None:
    with bench() as b:
        b.optimizer.before = failing
        b.optimizer.gate.clear()
        b.deliver(0, random_gradients())
        b.update(0)
        norm = b.updater.norm_of_updates()
        b.optimizer.gate.set()
        with pytest.raises(NoLuckError):
            norm.result(30)
        b.updater.discard()
        with pytest.raises(NoLuckError):
            b.updater.norm(NormOptions())


def test_updates_go_on_while_a_step_is_discarded_and_one_that_fails_leaves_that_step_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bench() as b:
        wait_for = b.updater._wait_for

        def step_and_wait(done: Callable[[], bool], fails: bool = True) -> None:
            b.optimizer.gate.set()
            wait_for(done, fails)

        monkeypatch.setattr(b.updater, "_wait_for", step_and_wait)
        for packs, before in (((0, 1), lambda: None), ((2,), failing)):
            b.optimizer.gate.clear()
            b.optimizer.before = before
            for pack in packs:
                b.deliver(pack, random_gradients())
                b.update(pack)
            b.updater.discard()
            assert b.optimizer.stepped == [*PACKS[0], *PACKS[1]]
        with pytest.raises(NoLuckError):
            b.updater.raise_failure()


def test_after_a_failure_no_swap_out_waits_for_room() -> None:
    gradients = random_gradients()
    with bench(limit=1) as b:
        b.optimizer.before = failing
        b.optimizer.gate.clear()
        b.deliver(0, gradients)
        b.update(0)
        engine = threading.Thread(target=b.gradients.swap_out, args=(gradients, 0), daemon=True)
        engine.start()
        b.optimizer.gate.set()
        engine.join(30)
        assert not engine.is_alive()
        with pytest.raises(NoLuckError):
            b.update(1)


def test_waiting_on_the_thread_itself_does_not_deadlock() -> None:
    with bench() as b:
        waited: list[str] = []

        def before() -> None:
            b.updater.wait(0)
            b.updater.wait_all()
            waited.append(threading.current_thread().name)

        b.optimizer.before = before
        b.deliver(0, random_gradients())
        b.update(0)
        b.updater.wait_all()
        assert waited == ["harmony-update"]


def test_stopping_finishes_queued_jobs() -> None:
    with bench() as b:
        b.optimizer.gate.clear()
        for pack in (2, 1, 0):
            b.deliver(pack, random_gradients())
            b.update(pack)
        b.optimizer.gate.set()
        b.updater.stop()
        assert sorted(b.optimizer.stepped) == sorted(name for names in PACKS.values() for name in names)


# ---- threads: a core is left to the one that feeds an accelerator


@pytest.mark.parametrize(
    ("torchs", "cores", "processes", "expected"),
    [(16, 16, 1, 15), (8, 16, 1, 8), (16, 16, 4, 3), (2, 2, 1, 1), (1, 64, 8, 1), (64, 64, 8, 7)],
)
def test_one_core_is_left(
    monkeypatch: pytest.MonkeyPatch, torchs: int, cores: int, processes: int, expected: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert update_threads(processes) == expected


def seen_on_another_thread() -> int:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def test_the_number_of_threads_is_that_of_the_update_thread_alone() -> None:
    one = stored(odd_sizes(), torch.float32)
    optimizer = HostOptimizer(torch.optim.SGD(list(one.store.masters.values()), lr=0.5), one.store.masters)
    gradients = HostGradients(one.device, Ledger(), torch.float32, None, optimizer.trains)
    with computing_with(3):
        updater = Updater(one.store, optimizer, gradients, threads=2)
        counts = [updater._ask(torch.get_num_threads), torch.get_num_threads(), seen_on_another_thread()]
        updater.stop()
    assert counts == [2, 3, 3]
