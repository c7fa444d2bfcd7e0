"""A loss that is not known yet: what keeps it pending, what looks at it, and what backward notes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harmony_ds.errors import BatchError
from harmony_ds.step.pending import Evaluation, Node, OutputsGiven, PendingTensor


class FakeSource:
    """A micro-batch whose model returns `of(w)`, computed when it is asked for."""

    def __init__(self, of: Callable[[Tensor], Tensor], weight: Tensor) -> None:
        self.of, self.weight = of, weight.clone().requires_grad_()
        self.looked = 0
        self.known: Tensor | None = None
        self.noted: list[Node] = []
        self.shares = False
        self.nodes: WeakSet[Node] = WeakSet()
        self.outputs_given = OutputsGiven.STAND_INS
        self.evaluates = self.is_of_outputs = self.joins_other_graphs = False

    @property
    def has_run(self) -> bool:
        return self.known is not None

    def outputs(self) -> Tensor:
        if self.known is None:
            self.looked += 1
            self.known = self.of(self.weight)
        return self.known

    def check_not_propagated(self) -> None:
        return None

    def share_loss(self, sources: Sequence[Any]) -> bool:
        return self.shares

    def note_backward(self, node: Node) -> None:
        self.noted.append(node)

    def part(self, node: Node) -> Tensor | None:
        """What a step gives to an evaluation for this micro-batch."""
        if self not in node.sources:
            return torch.zeros(node.shape)
        return None if node.read is None else self.of(self.weight)


def pending_of(of: Callable[[Tensor], Tensor], weight: Tensor) -> tuple[PendingTensor, FakeSource]:
    source, like = FakeSource(of, weight), of(weight)
    return PendingTensor(Node((source,), like.shape, like.dtype, like.device, read=lambda one: one)), source


def pending(slope: float = 3.0) -> tuple[PendingTensor, FakeSource]:
    """A loss of 3 w at w = 2."""
    return pending_of(lambda weight: weight * slope, torch.tensor(2.0))


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
    "added to a copy": (lambda loss: operator.iadd(loss.detach().clone(), loss), 12.0),
    "written by a method": (lambda loss: (loss * 3).sub_(6), 12.0),
    "looked at one by one": (lambda loss: (loss * torch.ones(2)).unbind()[1], 6.0),
    "comparison": (lambda loss: torch.where((loss > 5).logical_not(), 0.0, 3.0), 3.0),
    "by name": (lambda loss: torch.div(input=loss, other=4), 1.5),
}


@pytest.mark.parametrize("name", LAZY)
def test_arithmetic_stays_pending_and_has_the_right_value(name: str) -> None:
    function, expected = LAZY[name]
    loss, source = pending()
    result = function(loss)
    assert isinstance(result, PendingTensor)
    assert source.looked == 0

    assert result.item() == pytest.approx(expected)
    assert source.looked == 1


LOOKING: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "item": (lambda loss: loss.item(), 6.0),
    "float()": (lambda loss: float(loss.detach()), 6.0),
    "bool()": (bool, True),
    "comparison": (lambda loss: bool(loss > 5), True),
    "numpy": (lambda loss: float(loss.detach().numpy()), 6.0),
    "stack": (lambda loss: torch.stack([loss.detach(), torch.tensor(1.0)]).tolist(), [6.0, 1.0]),
    "added to a plain tensor": (lambda loss: torch.zeros(()).add_(loss.detach()).item(), 6.0),
    "vector": (lambda loss: (loss * torch.ones(2)).tolist(), [6.0, 6.0]),
    "several results": (lambda loss: [one.item() for one in (loss * torch.ones(2)).split(1)], [6.0, 6.0]),
}


@pytest.mark.parametrize("name", LOOKING)
def test_looking_computes_the_loss_once(name: str) -> None:
    look, expected = LOOKING[name]
    loss, source = pending()

    assert look(loss) == expected
    assert look(loss) == expected
    assert source.looked == 1


def test_metadata_is_that_of_a_scalar_and_neither_it_nor_printing_looks() -> None:
    loss, source = pending()

    for name in ("shape", "dtype", "device", "ndim", "requires_grad"):
        assert getattr(loss, name) == getattr(torch.tensor(1.0, requires_grad=True), name)
    assert (loss.dim(), loss.numel(), loss.is_floating_point()) == (0, 1, True)
    assert ((loss.double() + 1).dtype, loss.bfloat16().dtype) == (torch.float64, torch.bfloat16)
    assert repr(loss) == "PendingTensor(of shape (), not computed yet)"
    assert len({loss, loss, loss / 2}) == 2
    assert source.looked == 0
    loss.item()
    assert repr(loss.detach() + loss.detach()) == repr(operator.iadd(loss.detach(), 6)) == "tensor(12.)"


def test_a_detached_loss_has_no_gradient() -> None:
    loss, source = pending()
    detached = loss.detach()

    assert (loss.requires_grad, (loss / 2).requires_grad, detached.requires_grad) == (True, True, False)
    with torch.no_grad():
        assert not (loss / 2).requires_grad
    assert not detached.node.materialize().requires_grad
    assert source.looked == 1
    with pytest.raises(RuntimeError, match="does not require grad"):
        detached.backward()
    assert source.weight.grad is None


def test_sums_over_micro_batches_are_pending_until_all_are_asked_for() -> None:
    losses, sources = zip(*(pending(slope) for slope in (1.0, 2.0, 3.0)), strict=True)
    total = sum(loss.detach() for loss in losses)
    assert isinstance(total, PendingTensor)
    assert total.node.sources == sources
    assert not total.node.is_available

    assert total.item() == 2.0 + 4.0 + 6.0
    assert total.node.is_available
    assert [source.looked for source in sources] == [1, 1, 1]


def test_backward_of_a_loss_that_is_known_or_with_a_gradient_runs_at_once() -> None:
    (loss, known), (other, source) = pending(), pending()
    loss.item()
    loss.backward()
    other.backward(torch.tensor(2.0))

    assert not known.noted and not source.noted
    assert (known.weight.grad.item(), source.weight.grad.item()) == (3.0, 6.0)


@pytest.mark.parametrize(
    ("combine", "gradients", "times"),
    [
        (lambda first, second: (first / 2 + 1 - second * 3).float(), (0.5, -15.0), 1),
        (lambda first, second: first * second, (10.0, 10.0), 0),
        (lambda first, second: torch.stack([first, second]).mean(), (0.5, 2.5), 1),
        (lambda first, second: torch.tensor(40.0) / second + first, (1.0, -2.0), 1),
        (lambda first, second: (second - 9).exp() + first, (1.0, 5.0 * math.e), 1),
    ],
)
def test_backward_is_noted_with_the_arithmetic_before_it_where_each_micro_batch_has_a_part_of_its_own(
    combine: Callable[[Any, Any], Any], gradients: tuple[float, float], times: int
) -> None:
    (first, one), (second, two), (third, three) = pending(1.0), pending(5.0), pending(9.0)
    (third / 9).exp().backward()
    assert (len(three.noted), three.looked) == (1, 0)
    combine(first, second).backward()
    for source in (one, two):
        assert (len(source.noted), source.looked) == (times, 1 - times)
        for noted in source.noted:
            Evaluation(source.part).value_of(noted).backward()
    assert (one.weight.grad.item(), two.weight.grad.item()) == pytest.approx(gradients)


def test_backward_is_noted_where_micro_batches_share_a_loss() -> None:
    (first, one), (second, two) = pending(1.0), pending(5.0)
    one.shares = True
    (first * second).backward()
    assert (len(one.noted), one.looked, len(two.noted), two.looked) == (1, 0, 1, 0)


def test_losses_of_later_steps_are_added_to_a_known_sum_without_a_look() -> None:
    total, known = (pending()[0].detach().clone() for _ in range(2))
    known.item()
    total.item()
    total += known
    loss, source = pending()
    total += loss.detach()
    assert source.looked == 0

    assert total.item() == 18.0


def test_hundreds_of_losses_can_be_summed() -> None:
    assert float(sum(pending(1.0)[0].detach() for _ in range(300))) == 600.0


def logits() -> tuple[PendingTensor, FakeSource]:
    return pending_of(lambda weight: weight * 2, torch.arange(-2.0, 4.0).view(2, 3))


WRITING: list[Callable[[Any], Any]] = [
    lambda one: one.div_(4),
    lambda one: operator.isub(one.detach(), 4),
    lambda one: operator.imul(one.view(-1)[2:], 4),
    lambda one: F.relu(one, inplace=True),
    lambda one: one.__setitem__((0, 1), 9.0),
    lambda one: torch.mul(one.detach(), 3, out=one.detach()),
]


@pytest.mark.parametrize("write", WRITING)
@pytest.mark.parametrize("make", [lambda one: one * 2, lambda one: one.view(-1), lambda one: one.detach()[0]])
def test_what_is_written_reaches_what_was_made_before_where_it_does_in_torch(
    write: Callable[[Any], Any], make: Callable[[Any], Any]
) -> None:
    """That is by views alone."""
    output, source = logits()
    real = source.of(source.weight)
    results = []
    for one in (output * 1, real * 1):
        made = make(one)
        with torch.no_grad():
            write(one.detach())
        results += [one.tolist(), made.tolist(), (one + 1).tolist()]
    assert results[:3] == results[3:]
    assert source.looked == 1


TARGETS, MASK = torch.tensor([2, 0]), torch.tensor([True, False])
LOSSES: dict[str, Callable[[Any], Any]] = {
    "cross entropy": lambda out: F.cross_entropy(out, TARGETS),
    "a module's": lambda out: nn.CrossEntropyLoss(label_smoothing=0.1)(out, TARGETS),
    "by shape": lambda out: F.cross_entropy(out.view(-1, out.size(-1)), TARGETS.view(out.shape[0])),
    "by hand": lambda out: -out.log_softmax(-1).gather(1, TARGETS[:, None]).squeeze(1).mean(),
    "rows of it": lambda out: sum(F.mse_loss(out[row], torch.ones(3)) for row in range(len(out))) / 2,
    "several uses": lambda out: (F.log_softmax(out, -1).exp() * F.log_softmax(out, -1)).sum() + out.pow(2).mean(),
    "in half": lambda out: in_half(lambda: F.linear(out.float(), torch.ones(3, 3)).sum()),
    "of pairs": lambda out: -F.logsigmoid(out[:, 0] - out[:, 1]).mean(),
    "of parts": lambda out: sum((n + 1) * one.mean() for n, one in enumerate(F.normalize(out).split([1, 2], dim=-1))),
    "of the largest": lambda out: torch.min(out, out.clamp(0, 1)).mean() + out.amax(-1).sum(),
    "of masked rows": lambda out: F.cross_entropy(out[MASK], TARGETS[MASK]) + out[None, MASK, 1:].sum(),
    "of columns": lambda out: F.interpolate(F.pad(out.roll(1), (0, 1))[None], size=9).repeat(1, 2, 1).std(),
    "of ones": lambda out: F.binary_cross_entropy_with_logits(out, torch.ones_like(out)),
    "smoothed": lambda out: (torch.zeros_like(out).fill_(0.1).scatter_(1, TARGETS[:, None], 0.8) * out).sum(),
    "drawn": lambda out: torch.manual_seed(3) and (out * torch.randn_like(out) + out.new_ones(3)).sum(),
    "in place": lambda out: (-out.log_softmax(-1)).masked_fill_(TARGETS.eq(0)[:, None], 0.0).sub_(1).sum(),
}


def in_half(function: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return function()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_outputs_stays_pending_and_has_torchs_bits(name: str) -> None:
    output, source = logits()
    loss = LOSSES[name](output)
    loss.backward()
    assert isinstance(loss, PendingTensor) and not source.looked
    expected = LOSSES[name](source.of(source.weight))
    expected.backward()
    gradient, source.weight.grad = source.weight.grad, None
    for noted in source.noted:
        Evaluation(source.part).value_of(noted).backward()
    assert torch.equal(loss.detach().node.materialize(), expected)
    assert torch.equal(source.weight.grad, gradient)


def test_a_shape_that_the_program_was_told_and_that_is_another_one_now_is_an_error() -> None:
    output, source = logits()
    told, untold = output.reshape(output.shape[0], -1).sum(), logits()[0].pow(2)
    source.of = lambda weight: weight[:1] * 2
    untold.node.sources[0].of = source.of
    assert Evaluation(untold.node.sources[0].part).value_of(untold.node).shape == (1, 3)
    with pytest.raises(BatchError, match=r"told the shape \(2, 3\) .* now it is \(1, 3\)"):
        Evaluation(source.part).value_of(told.node)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone() * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


@pytest.mark.parametrize(
    ("make", "gradient"), [(lambda one: one, 10.0), (torch.sum, 10.0), (lambda one: operator.imul(one.sum(), 2), 20.0)]
)
def test_gradients_go_through_an_autograd_function(make: Callable[[Any], Any], gradient: float) -> None:
    output, source = logits()
    tripled: Any = Tripled.apply(make(output))
    tripled.sum().backward()
    assert tripled.tolist() == (make(source.weight.detach() * 2) * 3).tolist()
    assert torch.equal(source.weight.grad, torch.full((2, 3), gradient))


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_operands_are_those_of_the_moment(make: Callable[[Any], Any]) -> None:
    output, source = logits()
    rows = make([1, 1])
    chosen = output[rows]
    rows[:] = 0
    assert source.looked == 0

    assert chosen.tolist() == output.tolist()[1:] * 2


def test_an_operand_that_leads_gradients_elsewhere_is_a_look() -> None:
    loss, source = pending()
    elsewhere = torch.tensor(5.0, requires_grad=True)
    (loss * elsewhere).backward()

    assert source.looked == 1
    assert (elsewhere.grad, source.weight.grad) == (torch.tensor(6.0), torch.tensor(15.0))
