"""`harmony-ds trace`: a step as a picture, as it is predicted and, with --run, as it is executed."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from harmony_ds.cli import options
from harmony_ds.cli.plan import read_profile, surveyed
from harmony_ds.cli.show import DOES_NOT_FIT
from harmony_ds.config import Config
from harmony_ds.engine import HarmonyEngine
from harmony_ds.engine.admission import read_plan
from harmony_ds.engine.assembly import assemble
from harmony_ds.errors import ConfigError, DoesNotFitError
from harmony_ds.estimate.forecast import name_of
from harmony_ds.estimate.subject import Subject, load_subject
from harmony_ds.estimate.survey import Survey
from harmony_ds.estimate.text import columns, wrapped
from harmony_ds.profiler.profile import Profile
from harmony_ds.scheduler.saved import adopt
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.spans import busy_of
from harmony_ds.scheduler.trace import ExecutedStep, trace_of

_WARM_UP = 2  # the first step of a plan touches memory for the first time, the second one takes over its updates


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A trace, and what is printed of it."""

    name: str
    choice: Choice
    trace: Mapping[str, Any]
    executed: ExecutedStep | None


def command(
    wanted: options.Planned,
    output: Path,
    run: bool = False,
    steps: int = 3,
    profile: Path | None = None,
    as_json: bool = False,
) -> int:
    """Writes a Chrome trace of one step of MODEL on this machine, and prints how long each stream works."""
    if run and profile is not None:
        raise ConfigError("--run measures the model itself: leave --profile away.")
    config = wanted.config()
    try:
        if run:
            drawn = _executed(load_subject(wanted.model, wanted.shape(config), "cpu"), config, steps)
        else:
            known = None if profile is None else read_profile(profile)
            drawn = _simulated(*surveyed(wanted.model, wanted.shape(config), config, known), config, known)
    except DoesNotFitError as error:
        print(f"does not fit: {error}", file=sys.stderr)
        return DOES_NOT_FIT
    output.write_text(json.dumps(drawn.trace), encoding="utf-8")
    if as_json:
        print(json.dumps(_as_json(drawn, output), indent=1))
    else:
        _show(drawn, output)
    return 0


def _simulated(subject: Subject, survey: Survey, config: Config, known: Profile | None) -> _Drawn:
    rates, costs = survey.profile.machine, survey.costs
    saved = read_plan(config.harmony.plan)
    if saved is None:
        choice = search(survey.graph, costs, rates, survey.element, survey.request)[0]
    elif known is not None and saved.policy.resident:
        raise ConfigError("a plan with resident packs is checked on the device: leave --profile away.")
    else:
        choice = adopt(saved, survey.graph, costs, rates, survey.element, survey.request)
    names = tuple(layer.name for layer in survey.graph.layers)
    trace = trace_of(choice.plan, choice.prediction, costs, layer_names=names)
    return _Drawn(subject.name, choice, trace, None)


def _executed(subject: Subject, config: Config, steps: int) -> _Drawn:
    assembly = assemble(subject.model, config, None, None, None)
    engine = HarmonyEngine(subject.model, config, assembly)
    try:
        for _ in range(_WARM_UP):
            engine.train_batch(repeat(subject.inputs))
        with engine.record_steps() as recorded:
            for _ in range(steps):
                engine.train_batch(repeat(subject.inputs))
        middle = statistics.median_low(step.step_ms for step in recorded)
        shown = next(step for step in recorded if step.step_ms == middle)
        return _Drawn(subject.name, engine.plan_report().choices[0], engine.trace(shown), shown)
    finally:
        engine.destroy()


def _as_json(drawn: _Drawn, output: Path) -> dict[str, Any]:
    prediction, executed = drawn.choice.prediction, drawn.executed
    return {
        "model": drawn.name,
        "plan": drawn.choice.reason,
        "trace": str(output),
        "simulated": {"step_ms": prediction.step_ms, "busy_ms": busy_of(prediction.spans)},
        "executed": None if executed is None else {"step_ms": executed.step_ms, "busy_ms": dict(executed.busy_ms)},
    }


def _show(drawn: _Drawn, output: Path) -> None:
    prediction, executed = drawn.choice.prediction, drawn.executed
    both: dict[str, tuple[float, float | None]] = {
        name_of(name): (ms, None if executed is None else executed.busy_ms.get(name, 0.0))
        for name, ms in busy_of(prediction.spans).items()
    }
    both["the whole step"] = prediction.step_ms, None if executed is None else executed.step_ms
    head = ("busy, ms of one step", "simulated", *(("executed", "error") if executed else ()))
    print(wrapped(f"{drawn.name}, {drawn.choice.reason}"), end="\n\n")
    print(columns(head, [(what, *_cells(*ms)) for what, ms in both.items() if any(ms)]))
    print(f"\n{output}: open it in https://ui.perfetto.dev")


def _cells(simulated_ms: float, executed_ms: float | None) -> tuple[str, ...]:
    if executed_ms is None:
        return (f"{simulated_ms:,.1f}",)
    error = f"{simulated_ms / executed_ms - 1:+.0%}" if executed_ms else ""
    return f"{simulated_ms:,.1f}", f"{executed_ms:,.1f}", error
