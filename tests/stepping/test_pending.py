"""A loss that is not known yet: what keeps it pending, what looks at it, and what backward notes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harmony_ds.stepping.pending import PendingLoss


class FakeTicket:
    """A micro-batch whose loss is 3 w at w = 2, computed when it is asked for."""

    def __init__(self, slope: float = 3.0) -> None:
        self.weight = torch.tensor(2.0, requires_grad=True)
        self.slope = slope
        self.looked = 0
        self.known: Tensor | None = None
        self.noted: list[PendingLoss] = []

    @property
    def resolved(self) -> bool:
        return self.known is not None

    def loss(self, attached: bool) -> Tensor:
        if self.known is None:
            self.looked += 1
            self.known = self.weight * self.slope
            self.value = self.known.detach().clone()
        return self.known if attached else self.value

    def check_not_propagated(self) -> None:
        return None

    def backward(self, loss: PendingLoss) -> None:
        self.noted.append(loss)


def pending(slope: float = 3.0) -> tuple[PendingLoss, FakeTicket]:
    ticket = FakeTicket(slope)
    return PendingLoss((ticket,), torch.float32, torch.device("cpu")), ticket


LAZY: dict[str, tuple[Callable[[Any], Any], float]] = {
    "division": (lambda loss: loss / 4, 1.5),
    "multiplication from the left": (lambda loss: 2 * loss, 12.0),
    "sum with a number": (lambda loss: 1.0 + loss, 7.0),
    "scalar tensor": (lambda loss: loss * torch.tensor(0.5), 3.0),
    "float": (lambda loss: loss.float(), 6.0),
    "detach": (lambda loss: loss.detach() * 2, 12.0),
    "exp": (torch.exp, math.exp(6.0)),
    "chain": (lambda loss: (loss / 2 + 1).mean() * 3, 12.0),
    "divided by a statement": (lambda loss: operator.itruediv(loss, 4), 1.5),
    "added to a detached one": (lambda loss: operator.iadd(loss.detach(), loss), 12.0),
    "by name": (lambda loss: torch.div(input=loss, other=4), 1.5),
}


@pytest.mark.parametrize("name", LAZY)
def test_arithmetic_stays_pending_and_has_the_right_value(name: str) -> None:
    function, expected = LAZY[name]
    loss, ticket = pending()
    result = function(loss)
    assert isinstance(result, PendingLoss)
    assert ticket.looked == 0

    assert result.item() == pytest.approx(expected)
    assert ticket.looked == 1


LOOKING: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "item": (lambda loss: loss.item(), 6.0),
    "float()": (lambda loss: float(loss.detach()), 6.0),
    "bool()": (bool, True),
    "comparison": (lambda loss: bool(loss > 5), True),
    "numpy": (lambda loss: float(loss.detach().numpy()), 6.0),
    "stack": (lambda loss: torch.stack([loss.detach(), torch.tensor(1.0)]).tolist(), [6.0, 1.0]),
    "added to a plain tensor": (lambda loss: torch.zeros(()).add_(loss.detach()).item(), 6.0),
    "vector": (lambda loss: (loss * torch.ones(2)).tolist(), [6.0, 6.0]),
}


@pytest.mark.parametrize("name", LOOKING)
def test_looking_computes_the_loss_once(name: str) -> None:
    look, expected = LOOKING[name]
    loss, ticket = pending()

    assert look(loss) == expected
    assert look(loss) == expected
    assert ticket.looked == 1


def test_metadata_is_that_of_a_scalar_and_neither_it_nor_printing_looks() -> None:
    loss, ticket = pending()

    for name in ("shape", "dtype", "device", "ndim", "requires_grad"):
        assert getattr(loss, name) == getattr(torch.tensor(1.0, requires_grad=True), name)
    assert (loss.dim(), loss.numel(), loss.is_floating_point()) == (0, 1, True)
    assert ((loss.double() + 1).dtype, loss.bfloat16().dtype) == (torch.float64, torch.bfloat16)
    assert repr(loss) == "PendingLoss(of 1 micro-batches, not computed yet)"
    assert len({loss, loss, loss / 2}) == 2
    assert ticket.looked == 0


def test_a_detached_loss_has_no_gradient() -> None:
    loss, ticket = pending()
    detached = loss.detach()

    assert (loss.requires_grad, (loss / 2).requires_grad, detached.requires_grad) == (True, True, False)
    with torch.no_grad():
        assert not (loss / 2).requires_grad
    assert not detached.value().requires_grad
    assert ticket.looked == 1


def test_sums_over_micro_batches_are_pending_until_all_are_asked_for() -> None:
    losses, tickets = zip(*(pending(slope) for slope in (1.0, 2.0, 3.0)), strict=True)
    total = sum(loss.detach() for loss in losses)
    assert isinstance(total, PendingLoss)
    assert total.tickets == tickets
    assert not total.resolved

    assert total.item() == 2.0 + 4.0 + 6.0
    assert total.resolved
    assert [ticket.looked for ticket in tickets] == [1, 1, 1]


def test_backward_of_a_loss_that_is_known_or_with_a_gradient_runs_at_once() -> None:
    (loss, known), (other, ticket) = pending(), pending()
    loss.item()
    loss.backward()
    other.backward(torch.tensor(2.0))

    assert not known.noted and not ticket.noted
    assert (known.weight.grad.item(), ticket.weight.grad.item()) == (3.0, 6.0)


@pytest.mark.parametrize(
    ("combine", "gradients", "times"),
    [
        (lambda first, second: (first / 2 + 1 - second * 3).float(), (0.5, -15.0), 1),
        (lambda first, second: first * second, (10.0, 10.0), 0),
        (lambda first, second: torch.tensor(40.0) / second + first, (1.0, -2.0), 0),
        (lambda first, second: (second - 9).exp() + first, (1.0, 5.0 * math.e), 0),
    ],
)
def test_backward_is_noted_with_the_arithmetic_before_it_where_each_micro_batch_has_a_part_of_its_own(
    combine: Callable[[Any, Any], Any], gradients: tuple[float, float], times: int
) -> None:
    (first, one), (second, two), (third, three) = pending(1.0), pending(5.0), pending(9.0)
    (third / 9).exp().backward()
    assert (len(three.noted), three.looked) == (1, 0)
    combine(first, second).backward()
    for ticket in (one, two):
        assert (len(ticket.noted), ticket.looked) == (times, 1 - times)
        values = {one: torch.zeros(()), two: torch.zeros(()), ticket: ticket.weight * ticket.slope}
        for noted in ticket.noted:
            noted.evaluate(values.__getitem__).backward()
    assert (one.weight.grad.item(), two.weight.grad.item()) == pytest.approx(gradients)


def test_backward_of_a_detached_loss_is_torchs_error() -> None:
    loss, ticket = pending()
    loss.item()
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.detach().backward()
    assert ticket.weight.grad is None


def test_losses_of_later_steps_are_added_to_a_known_sum_without_a_look() -> None:
    total: Any = pending()[0].detach()
    total.item()
    loss, ticket = pending()
    total += loss.detach()
    assert ticket.looked == 0

    assert total.item() == 12.0


def test_hundreds_of_losses_can_be_summed() -> None:
    assert float(sum(pending(1.0)[0].detach() for _ in range(300))) == 600.0


WRITING: list[Callable[[Any], Any]] = [lambda loss: loss.div_(4), lambda loss: loss.clamp_(max=1.5)]


@pytest.mark.parametrize("write", WRITING)
def test_what_is_written_into_a_loss_stays(write: Callable[[Any], Any]) -> None:
    loss, ticket = pending()
    before, detached = loss * 2, loss.detach()
    with torch.no_grad():
        write(detached)
    write(loss)

    assert (loss.item(), detached.item(), before.item()) == (1.5, 1.5, 12.0)
    loss.backward()
    assert ticket.weight.grad.item() in (0.75, 0.0)


def test_operands_are_those_of_the_moment() -> None:
    loss, _ = pending()
    weight = torch.tensor(0.5)
    weighted = loss * weight
    weight.zero_()

    assert weighted.item() == 3.0


def test_an_operand_that_leads_gradients_elsewhere_is_a_look() -> None:
    loss, ticket = pending()
    elsewhere = torch.tensor(5.0, requires_grad=True)
    (loss * elsewhere).backward()

    assert ticket.looked == 1
    assert (elsewhere.grad, ticket.weight.grad) == (torch.tensor(6.0), torch.tensor(15.0))
