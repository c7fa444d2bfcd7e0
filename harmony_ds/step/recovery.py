"""What is done about an error in a run: one table, by which `Recovery.recover` acts.

`python -m harmony_ds.step` prints it. The run is undone first, as `undo` says. Then it is either made again, after
which the step goes on as if nothing had happened, or the error is raised. Whether a raised error drops the step is said in
`transitions`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from harmony_ds.distributed import PeerDiverged
from harmony_ds.errors import DoesNotFitError, ModelError, PeerFailedError, UnsupportedError
from harmony_ds.model.contract import UnseenError
from harmony_ds.runtime.leftovers import Leftovers
from harmony_ds.runtime.micro_batch import OffPlanError
from harmony_ds.runtime.outcome import Outcome
from harmony_ds.step.context import StepContext
from harmony_ds.step.retry_budget import RetryBudget
from harmony_ds.step.run import Run, RunKind
from harmony_ds.step.undo import comes_after_updates, surviving, undo_run

MOST_ATTEMPTS = 8
"""How often the same micro-batches run, if each time the model calls layers that were not measured; and how often, if each
time the device runs out of memory."""


class ErrorKind(enum.Enum):
    """What an error that ends a run means for it."""

    USER_ERROR = "the model, a loss, a check or the planner raised an error"
    OFF_PLAN = "a layer call came that was not measured"
    NO_PLAN = "no plan fits, or none beside a loss of several forward passes"
    OUT_OF_MEMORY = "the device ran out of memory"
    PEER_DIVERGED = "another process makes its run again"
    PEER_FAILED = "another process failed, or ended"
    UPDATE_FAILED = "it came after updates were issued, or an earlier one has ended the engine"


class Repetition(enum.Enum):
    """How a run is made again after an error."""

    MEASURED_ANEW = "each of its micro-batches may take another way through the model than was measured"
    FOR_LESS_MEMORY = "its micro-batches take the way that was measured, with a plan for a lower budget"


@dataclass(frozen=True, slots=True)
class Remedy:
    """What is done about an error of some kind.

    Attributes:
        action: the method of `Recovery` that is called with the error; it raises, or returns how the run is made again.
        sentence: what that means, for people.
        when: a method of `Recovery` that must return True for it; the first remedy of a kind that fits is taken.
    """

    action: Callable[[Any, Any], Repetition]
    sentence: str
    when: Callable[[Any], bool] | None = None


class Recovery:
    """Recovers one run from its errors: chooses the remedy by the table below, and applies it.

    Attributes:
        outcome: what the run has updated, this time.
    """

    def __init__(self, context: StepContext, run: Run) -> None:
        self._context = context
        self._run = run
        self.outcome = Outcome()
        self._budget = RetryBudget(context.runtime.device, context.planner)
        self._measured_anew = self._planned_for_less = 0  # how often the run is made again so

    def recover(self, error: BaseException) -> Repetition:
        """Undo the run, and do what the table says about `error`: return how the run is to be made again, or raise."""
        remedy = self._remedy(self._kind_of(error))
        undo_run(self._context, self._run, self.outcome)
        return remedy.action(self, error)

    def end(self, error: BaseException) -> None:
        """Restore the budget of device memory, since the run ends with `error`.

        Raises:
            torch.OutOfMemoryError: the first one, where no smaller plan fits.
        """
        self._budget.restore(error)

    def _kind_of(self, error: BaseException) -> ErrorKind:
        if comes_after_updates(self._context, self.outcome):
            return ErrorKind.UPDATE_FAILED
        if isinstance(error, OffPlanError | UnseenError):
            return ErrorKind.OFF_PLAN
        if isinstance(error, PeerDiverged):
            return ErrorKind.PEER_DIVERGED
        if isinstance(error, DoesNotFitError):
            return ErrorKind.NO_PLAN
        if isinstance(error, torch.OutOfMemoryError):
            return ErrorKind.OUT_OF_MEMORY
        if isinstance(error, PeerFailedError):
            return ErrorKind.PEER_FAILED
        return ErrorKind.USER_ERROR

    def _remedy(self, kind: ErrorKind) -> Remedy:
        return next(one for one in REMEDIES[kind] if one.when is None or one.when(self))

    # ---- what the table asks

    def is_forward_alone(self) -> bool:
        """Whether the run is a forward pass without backward, so that the rest of the step goes on without it."""
        return self._run.kind is RunKind.FORWARD

    def can_run_again(self) -> bool:
        """Whether the run can be measured, planned and made again, with the same results."""
        return self._is_repeatable() and self._measured_anew < MOST_ATTEMPTS - 1

    def was_made_too_often(self) -> bool:
        """Whether the run could be made again, and has been as often as it may."""
        return self._is_repeatable() and self._measured_anew >= MOST_ATTEMPTS - 1

    def _is_repeatable(self) -> bool:
        run = self._run
        if run.kind in (RunKind.UPDATE, RunKind.UPDATE_BY_HAND):
            return False
        if run.kind is RunKind.FORWARD:
            return self._context.world.size == 1
        if run.kind is RunKind.EVALUATION:
            return True
        if self._context.runtime.user_gradients.popped > run.taken_gradients:
            return False  # those gradients are gone, and would be missing when the step runs again
        keeps_gradients = surviving(self._context, run) is Leftovers.COPIES_AND_GRADIENTS
        return (keeps_gradients or not run.follows_part) and not run.cannot_repeat

    def can_cut_further(self) -> bool:
        """Whether the run can be made again, and the ds_config leaves open how many rows and tokens a layer call takes."""
        return self._context.planner.cuts.may_change and self.can_run_again()

    def can_plan_for_less(self) -> bool:
        """Whether the run can be planned with a lower budget and made again."""
        runtime = self._context.runtime
        if self._run.kind is RunKind.EVALUATION or not self._is_repeatable():
            return False
        if self._planned_for_less >= MOST_ATTEMPTS - 1:
            return False
        return runtime.world.size == 1 and runtime.device.budget_bytes is not None

    # ---- what the table does

    def measure_again(self, error: BaseException) -> Repetition:
        """Let the run's micro-batches be measured, planned and run again, in all processes."""
        if not isinstance(error, PeerDiverged):
            self._context.world.tell_diverged()
        self._measured_anew += 1
        return Repetition.MEASURED_ANEW

    def plan_for_less(self, error: torch.OutOfMemoryError) -> Repetition:
        """Let the run's micro-batches be planned for a lower budget, and run again."""
        self._budget.lower(error)
        self._planned_for_less += 1
        return Repetition.FOR_LESS_MEMORY

    def raise_error(self, error: BaseException) -> NoReturn:
        """Raise `error`."""
        raise error

    def refuse_another_forward(self, error: BaseException) -> NoReturn:
        """Raise an error for a forward pass that several processes cannot run again."""
        self._context.world.refuse(
            "a micro-batch that is looked at before its step takes another way through the model than those before"
        )
        raise error

    def refuse_another_way(self, _: BaseException) -> NoReturn:
        """Raise an error for a run that was to be made again, and cannot."""
        raise UnsupportedError(
            "a micro-batch takes another way through the model than those that were measured (LayerDrop, or code "
            "that depends on data), in a step of which losses or outputs were looked at, or which has used gradients of "
            "the program's own backward passes: such a step is not run again. Nothing has been updated. Look at losses "
            "after engine.step(), or at all of a step's before its boundary."
        ) from None

    def refuse_another_attempt(self, _: BaseException) -> NoReturn:
        """Raise an error for a run that has been made as often as it may."""
        raise ModelError(
            f"the same micro-batches were measured and run {MOST_ATTEMPTS} times, with the same random numbers of torch, "
            "and the model called layers again that it had not called when it was measured. Which layers a call runs must "
            "depend on its inputs and torch's random numbers alone."
        ) from None

    def give_up(self, error: BaseException) -> NoReturn:
        """End the engine, since something has been updated, and raise `error`."""
        end_engine(self._context, error)
        raise error


def end_engine(context: StepContext, error: BaseException) -> None:
    """Note that the engine cannot go on, since `error` came after updates of its step."""
    if context.health.failed is None:
        context.health.fail(f"a step failed after its updates had begun: {error!r}")


# ---- the table

_AGAIN = Remedy(
    Recovery.measure_again, "Measure and plan anew, and run again: no weight has changed.", Recovery.can_run_again
)
_ANOTHER_FORWARD = Remedy(
    Recovery.refuse_another_forward,
    "Its caller gets the error: processes would have to run it again together.",
    Recovery.is_forward_alone,
)
_RAISE = Remedy(Recovery.raise_error, "The caller gets the error.")
REMEDIES: dict[ErrorKind, tuple[Remedy, ...]] = {
    ErrorKind.USER_ERROR: (_RAISE,),
    ErrorKind.OFF_PLAN: (
        _AGAIN,
        Remedy(
            Recovery.refuse_another_attempt,
            "Each time the run was made, the model called other layers. The error says what to do.",
            Recovery.was_made_too_often,
        ),
        _ANOTHER_FORWARD,
        Remedy(Recovery.refuse_another_way, "What has been read cannot be run again. The error says what to do."),
    ),
    ErrorKind.NO_PLAN: (
        Remedy(
            Recovery.measure_again,
            "Measure and plan anew, with fewer rows or tokens in a layer call, and run again.",
            Recovery.can_cut_further,
        ),
        _RAISE,
    ),
    ErrorKind.OUT_OF_MEMORY: (
        Remedy(
            Recovery.plan_for_less,
            "Lower the device memory budget, plan anew, and run again: no weight has changed.",
            Recovery.can_plan_for_less,
        ),
        _ANOTHER_FORWARD,
        _RAISE,
    ),
    ErrorKind.PEER_DIVERGED: (_AGAIN, _ANOTHER_FORWARD, _RAISE),
    ErrorKind.PEER_FAILED: (_RAISE,),
    ErrorKind.UPDATE_FAILED: (
        Remedy(Recovery.give_up, "The engine cannot go on, since some layers were updated. The caller gets the error."),
    ),
}
"""What is done about each kind of error: the first remedy that fits."""


def remedies() -> Iterator[tuple[ErrorKind, Remedy]]:
    """Yield every remedy, by the kind of error."""
    for kind, row in REMEDIES.items():
        for remedy in row:
            yield kind, remedy


def as_markdown() -> str:
    """Return the table in Markdown."""
    lines = ["| error | when | what is done |", "|---|---|---|"]
    last = None
    for kind, remedy in remedies():
        name = "" if kind is last else f"{kind.name}: {kind.value}"
        when = "" if remedy.when is None else remedy.when.__name__.replace("_", " ")
        lines.append(f"| {name} | {when} | {remedy.sentence} `{remedy.action.__name__}` |")
        last = kind
    return "\n".join(lines)
