"""A loss that is not known yet: what keeps it pending, what looks at it, and what backward notes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harmony_ds.stepping.pending import PendingLoss
from harmony_ds.stepping.pending_output import OutputForm


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
    return PendingLoss.of(ticket, torch.float32, torch.device("cpu")), ticket


LAZY: dict[str, tuple[Callable[[Any], Any], float]] = {
    "division": (lambda loss: loss / 4, 1.5),
    "multiplication from the left": (lambda loss: 2 * loss, 12.0),
    "sum with a number": (lambda loss: 1.0 + loss, 7.0),
    "difference": (lambda loss: 10 - loss, 4.0),
    "negation": (lambda loss: -loss, -6.0),
    "scalar tensor": (lambda loss: loss * torch.tensor(0.5), 3.0),
    "mean": (lambda loss: loss.mean(), 6.0),
    "float": (lambda loss: loss.float(), 6.0),
    "double": (lambda loss: loss.double() / 4, 1.5),
    "clone": (lambda loss: loss.clone(), 6.0),
    "detach": (lambda loss: loss.detach() * 2, 12.0),
    "exp": (torch.exp, math.exp(6.0)),
    "chain": (lambda loss: (loss / 2 + 1).mean() * 3, 12.0),
    "in place": (lambda loss: loss.__imul__(2), 12.0),
    "augmented": (lambda loss: loss.detach().__iadd__(1), 7.0),
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
    "int()": (lambda loss: int(loss.detach()), 6),
    "bool()": (bool, True),
    "comparison": (lambda loss: bool(loss > 5), True),
    "formatting": (lambda loss: f"{loss:.1f}", "6.0"),
    "tolist": (lambda loss: loss.tolist(), 6.0),
    "numpy": (lambda loss: float(loss.detach().numpy()), 6.0),
    "isnan": (lambda loss: bool(torch.isnan(loss)), False),
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


METADATA: dict[str, Callable[[Any], Any]] = {
    "shape": lambda loss: loss.shape,
    "dtype": lambda loss: loss.dtype,
    "device": lambda loss: loss.device,
    "dim": lambda loss: loss.dim(),
    "numel": lambda loss: loss.numel(),
    "floating point": lambda loss: loss.is_floating_point(),
    "requires_grad": lambda loss: loss.requires_grad,
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_that_of_a_scalar_and_does_not_look(name: str) -> None:
    loss, ticket = pending()

    assert METADATA[name](loss) == METADATA[name](torch.tensor(1.0, requires_grad=True))
    assert ticket.looked == 0


def test_printing_does_not_look() -> None:
    loss, ticket = pending()

    assert repr(loss) == "PendingLoss(of 1 micro-batches, not computed yet)"
    assert ticket.looked == 0
    loss.item()
    assert repr(loss) == "PendingLoss(of 1 micro-batches, known)"


def test_dtypes_follow_the_arithmetic() -> None:
    loss, _ = pending()

    assert (loss.double() + 1).dtype == torch.float64
    assert loss.bfloat16().dtype == torch.bfloat16


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
    assert total.tickets == set(tickets)
    assert not total.resolved

    assert total.item() == 2.0 + 4.0 + 6.0
    assert total.resolved
    assert [ticket.looked for ticket in tickets] == [1, 1, 1]


def test_backward_is_noted_with_the_arithmetic_before_it() -> None:
    loss, ticket = pending()
    (loss / 4).backward()
    (noted,) = ticket.noted
    assert ticket.looked == 0

    own = ticket.weight * 3
    noted.evaluate(lambda _: own).backward()
    assert ticket.weight.grad.item() == 0.75


def test_backward_of_a_loss_that_is_known_runs_at_once() -> None:
    loss, ticket = pending()
    loss.item()
    loss.backward()

    assert not ticket.noted
    assert ticket.weight.grad.item() == 3.0


def test_backward_over_several_micro_batches_runs_at_once() -> None:
    first, one = pending(1.0)
    second, two = pending(5.0)
    (first + second).backward()

    assert (one.weight.grad.item(), two.weight.grad.item()) == (1.0, 5.0)


def test_backward_with_a_gradient_runs_at_once() -> None:
    loss, ticket = pending()
    loss.backward(torch.tensor(2.0))

    assert ticket.weight.grad.item() == 6.0


def test_backward_of_a_detached_loss_is_torchs_error() -> None:
    loss, ticket = pending()
    loss.item()
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.detach().backward()
    assert ticket.weight.grad is None


Program = Callable[[Any], Any]

# What each program gives, and what it leaves in the loss and in its gradient, is asked of a plain tensor, too.
WRITING: dict[str, Program] = {
    "divided": lambda loss: loss.detach().div_(4),
    "divided by a statement": lambda loss: loss.detach().__itruediv__(4),
    "a sum over itself": lambda loss: loss.detach().add_(loss),
    "a sum in another dtype": lambda loss: loss.detach().add_(torch.tensor(1.0, dtype=torch.float64)),
    "filled": lambda loss: loss.detach().fill_(1.5),
    "filled through .data": lambda loss: loss.data.fill_(1.5),
    "copied into": lambda loss: loss.detach().copy_(torch.tensor(2.5)),
    "clamped and divided": lambda loss: loss.detach().clamp_(max=5.0).div_(2),
    "looked at before": lambda loss: (float(loss.detach()), loss.detach().mul_(3))[1],
    "written by out=": lambda loss: torch.add(loss.detach(), 1.0, out=loss.detach()),
    "attached, divided": lambda loss: loss.div_(4),
    "attached, known and divided": lambda loss: (loss.item(), loss.div_(4))[1],
    "attached, clamped": lambda loss: (loss * 1).clamp_(max=100.0),
    "attached, clamped away": lambda loss: (loss * 1).clamp_(max=5.0),
    "attached, a known one clamped away": lambda loss: (loss.item(), (loss * 1).clamp_(max=5.0))[1],
    "a copy": lambda loss: loss.detach().clone().fill_(1.5),
    "what was made before": lambda loss: (loss * 2, loss.detach().fill_(1.0))[0],
    "what was made before of a known one": lambda loss: (loss.detach() * 2, loss.item(), loss.detach().fill_(1.0))[0],
    "what is made behind": lambda loss: (loss.detach().div_(4), loss * 2)[1],
    "a detached one divided beside": lambda loss: (loss.detach().div_(4), loss)[1],
}


@pytest.mark.parametrize("name", WRITING)
def test_what_is_written_in_place_stays_as_in_a_plain_tensor(name: str) -> None:
    loss, ticket = pending()
    weight = torch.tensor(2.0, requires_grad=True)
    plain = weight * 3.0

    result, expected = WRITING[name](loss), WRITING[name](plain)

    assert (result.item(), result.dtype) == (expected.item(), expected.dtype)
    assert loss.item() == plain.item()
    assert result.requires_grad == expected.requires_grad
    if expected.requires_grad:
        result.backward()
        expected.backward()
        for noted in ticket.noted:
            noted.evaluate(lambda _: ticket.weight * 3).backward()
        assert ticket.weight.grad == weight.grad


def test_arithmetic_in_place_stays_pending() -> None:
    loss, ticket = pending()
    mean = loss.detach()
    mean /= 4
    mean.add_(1.0)

    assert isinstance(mean, PendingLoss)
    assert ticket.looked == 0


def test_what_is_written_after_backward_does_not_change_the_gradient() -> None:
    loss, ticket = pending()
    loss.backward()
    loss.div_(4)

    (noted,) = ticket.noted
    noted.evaluate(lambda _: ticket.weight * 3).backward()
    assert ticket.weight.grad.item() == 3.0


def test_losses_are_hashed_by_identity() -> None:
    loss, ticket = pending()

    assert len({loss, loss, loss / 2}) == 2
    assert ticket.looked == 0


# ---- outputs


class Outputs(dict[str, Any]):
    """As transformers' ModelOutput: attributes, keys, and a tuple's places."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def pending_output() -> tuple[Any, PendingLoss, list[str]]:
    looked: list[str] = []
    loss, _ = pending()

    def outputs() -> Outputs:
        looked.append("outputs")
        return Outputs(loss=torch.tensor(6.0), logits=torch.ones(2))

    real = Outputs(loss=torch.tensor(6.0), logits=torch.ones(2))
    form = OutputForm.of(real, real["loss"])
    assert form is not None
    return form.pending(loss, outputs), loss, looked


@pytest.mark.parametrize("look", [lambda o: o.loss, lambda o: o["loss"], lambda o: o[0]])
def test_the_loss_of_pending_outputs_stays_pending(look: Callable[[Any], Any]) -> None:
    output, loss, looked = pending_output()

    assert look(output) is loss
    assert "loss" in output
    assert repr(output).startswith("Outputs(loss=PendingLoss(")
    assert not looked


@pytest.mark.parametrize("look", [lambda o: o.logits, lambda o: o["logits"], lambda o: o[1]])
def test_anything_else_computes_the_outputs(look: Callable[[Any], Any]) -> None:
    output, _, looked = pending_output()

    assert look(output).tolist() == [1.0, 1.0]
    assert looked == ["outputs"]


def test_pending_outputs_are_iterated_and_counted_like_the_real_ones() -> None:
    output, _, _ = pending_output()

    assert list(output) == ["loss", "logits"]
    assert len(output) == 2
    assert "logits" in output
    assert "hidden" not in output


def test_what_the_outputs_do_not_have_is_their_error() -> None:
    output, _, looked = pending_output()
    assert not hasattr(output, "__array__")
    assert not looked
    with pytest.raises(KeyError, match="hidden"):
        _ = output.hidden
