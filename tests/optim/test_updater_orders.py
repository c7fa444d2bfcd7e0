"""Random sequences of requests to the update thread give the results of the same work done in turn.

An example is a list of requests. The thread works on them beside the next ones; the model beside it works on each at
once, with plain tensors. What an engine never does is left out: gradients for a pack whose update is pending.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harmony_ds.optim.updater import NormOptions
from tests.offload.examples import odd_sizes
from tests.optim.test_updater import PACKS, UpdaterSetup, bench, random_gradients


class Reference:
    """Reference that does every request at once, on a plain model."""

    def __init__(self) -> None:
        self.model = odd_sizes()
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.sums: dict[str, Tensor] = {}

    def deliver(self, gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            self.sums[name] = self.sums[name] + gradient if name in self.sums else gradient.clone()

    def take(self, pack: int) -> dict[str, Tensor]:
        return {name: self.sums.pop(name) for name in PACKS[pack] if name in self.sums}

    def update(self, pack: int) -> None:
        self._step(self.take(pack), 0.0)

    def clipped_updates(self, max_norm: float) -> float:
        """Update everything, and return the norm."""
        sums, self.sums = self.sums, {}
        return self._step(sums, max_norm)

    def _step(self, sums: dict[str, Tensor], max_norm: float) -> float:
        for name, parameter in self.parameters.items():
            parameter.grad = sums.get(name)
        total = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm or float("inf")).item()
        if sums:
            self.optimizer.step()
        return total


class Comparison:
    """Makes every request of the updater and of the reference, and compares the answers."""

    def __init__(self, beside: UpdaterSetup) -> None:
        self.beside = beside
        self.in_turn = Reference()

    def deliver(self, pack: int, seed: int) -> None:
        gradients = {name: g for name, g in random_gradients(seed).items() if name in PACKS[pack]}
        if seed % 3 == 0:  # a micro-batch need not pass all of a layer
            del gradients[PACKS[pack][1]]
        self.beside.updater.wait(pack)
        self.beside.deliver(pack, gradients)
        self.in_turn.deliver(gradients)

    def update(self, pack: int, _: int) -> None:
        self.beside.update(pack)
        self.in_turn.update(pack)

    def clipped(self, _: int, seed: int) -> None:
        max_norm = (0.0, 0.1, 1e6)[seed % 3]
        updater = self.beside.updater
        updater.wait_all()
        updater.norm(NormOptions()).result(30)  # of the updates before, which is nobody's concern
        for names in PACKS.values():
            updater.compute_norms(names)
        norm = updater.norm(NormOptions(max_norm=max_norm))
        for pack in PACKS:
            self.beside.update(pack, norm)
        expected = self.in_turn.clipped_updates(max_norm)
        assert norm.result(30).total == expected

    def take(self, pack: int, _: int) -> None:
        self._same(self.beside.updater.pop_gradients(PACKS[pack]), self.in_turn.take(pack))

    def drop(self, pack: int, _: int) -> None:
        self.beside.updater.discard_gradients(PACKS[pack])
        self.in_turn.take(pack)

    def discard(self, _: int, __: int) -> None:
        self.beside.updater.discard()
        self.in_turn.sums.clear()

    def look(self, pack: int, _: int) -> None:
        for name in PACKS[pack]:
            found, expected = self.beside.updater.gradient(name), self.in_turn.sums.get(name)
            assert (found is None) == (expected is None)
            assert found is None or torch.equal(found, expected)

    def wait(self, pack: int, _: int) -> None:
        self.beside.updater.wait(pack)
        for name in PACKS[pack]:
            assert not self.beside.updater.is_updating(name)
        self._same(
            {name: self.beside.parameters[name] for name in PACKS[pack]},
            {name: self.in_turn.parameters[name] for name in PACKS[pack]},
        )

    def finish(self) -> None:
        self.beside.updater.wait_all()
        self._same(dict(self.beside.parameters), self.in_turn.parameters)

    def _same(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name


Request = tuple[Callable[[Comparison, int, int], None], int, int]
NUMBERS = st.integers(0, 8)


def requests_of(*kinds: Callable[[Comparison, int, int], None]) -> st.SearchStrategy[list[Request]]:
    """Return lists of requests for any pack; half of them are transfers."""
    some = st.sampled_from((*kinds, *[Comparison.deliver] * len(kinds)))
    return st.lists(st.tuples(some, st.sampled_from(sorted(PACKS)), NUMBERS), max_size=24)


EVERYTHING = requests_of(
    Comparison.update,
    Comparison.clipped,
    Comparison.take,
    Comparison.drop,
    Comparison.discard,
    Comparison.look,
    Comparison.wait,
)


@given(EVERYTHING)
def test_any_order_of_requests_is_the_same_work_in_turn(requests: list[Request]) -> None:
    with bench() as b:
        both = Comparison(b)
        for make, pack, number in requests:
            make(both, pack, number)
        both.finish()


@given(requests_of(Comparison.update), st.integers(1, 3))
def test_few_buffers_change_nothing_and_are_released(requests: list[Request], limit: int) -> None:
    """Update each pack after its transfer, as an engine does."""
    with bench(limit=limit) as b:
        both = Comparison(b)
        for _, pack, number in requests:
            both.deliver(pack, number)
            both.update(pack, number)
        both.finish()
        assert b.gradients.host_bytes <= limit * (2 * 64 + 64)


@given(st.lists(NUMBERS, min_size=3, max_size=6))
def test_several_transfers_are_added_up_in_their_order(seeds: list[int]) -> None:
    """The thread is held up meanwhile: no sum has been begun."""
    with bench() as b:
        both = Comparison(b)
        both.deliver(2, 1)
        b.optimizer.gate.clear()
        both.update(2, 0)
        assert b.optimizer.entered.wait(30)
        for seed in seeds:
            both.deliver(0, seed)
        b.optimizer.gate.set()
        both.look(0, 0)
        both.update(0, 0)
        both.finish()


@given(st.permutations(range(3)), st.lists(st.integers(0, 2), max_size=8))
def test_of_queued_updates_the_lowest_pack_is_first(order: list[int], later: list[int]) -> None:
    """The first one to be queued has begun; the others go by their numbers, and equal ones in turn."""
    with bench() as b:
        both = Comparison(b)
        for pack in order:
            both.deliver(pack, 1)
        b.optimizer.gate.clear()
        both.update(order[0], 0)
        assert b.optimizer.entered.wait(30)
        for pack in [*order[1:], *later]:
            both.update(pack, 0)
        b.optimizer.gate.set()
        both.finish()
        waiting = sorted(order[1:])
        assert b.optimizer.stepped == [name for pack in (order[0], *waiting) for name in PACKS[pack]]
