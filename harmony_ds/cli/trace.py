"""`harmony-ds trace`: draw one step as a timeline, as it is predicted and, with --run, as it is executed."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

from harmony_ds.assembly.preflight import read_plan
from harmony_ds.cli import options
from harmony_ds.cli.answer import DOES_NOT_FIT
from harmony_ds.cli.plan import survey_here
from harmony_ds.cli.progress import tell
from harmony_ds.config import Config
from harmony_ds.engine import initialize
from harmony_ds.errors import ConfigError, DoesNotFitError
from harmony_ds.estimate.subject import Subject, load_subject
from harmony_ds.estimate.survey import Survey
from harmony_ds.estimate.text import columns, wrapped
from harmony_ds.scheduler.saved import adopt
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.spans import busy_of
from harmony_ds.scheduler.trace import ExecutedStep, trace_of

_WARM_UP = 2  # the first step of a plan touches memory for the first time, the second one takes over its updates
_STEP = "the whole step"


def command(args: argparse.Namespace) -> int:
    if args.run and args.profile is not None:
        raise ConfigError("--run measures the model itself: leave --profile away.")
    config = options.config_of(args)
    tell(f"{'training' if args.run else 'planning'} {args.model} ...")
    try:
        if args.run:
            subject = load_subject(args.model, "cpu", config.micro_batch, args.sequence)
            choice, trace, executed = _executed(subject, config, args.steps)
        else:
            survey = survey_here(args, config)
            subject = survey.subject
            choice, trace, executed = *_simulated(survey, args.profile), None
    except DoesNotFitError as error:
        print(f"does not fit: {error}", file=sys.stderr)
        return DOES_NOT_FIT
    args.output.write_text(json.dumps(trace), encoding="utf-8")
    simulated = {"step_ms": choice.prediction.step_ms, "busy_ms": busy_of(choice.prediction.spans)}
    done = None if executed is None else {"step_ms": executed.step_ms, "busy_ms": dict(executed.busy_ms)}
    if args.json:
        names = {"model": subject.name, "plan": choice.reason, "trace": str(args.output)}
        print(json.dumps({**names, "simulated": simulated, "executed": done}, indent=1))
    else:
        print(wrapped(f"{subject.name}, {choice.reason}"), end="\n\n")
        print(_table(simulated, done))
        print(f"\n{args.output}: open it in https://ui.perfetto.dev")
    return 0


def _simulated(survey: Survey, profile: Path | None) -> tuple[Choice, dict[str, Any]]:
    rates, costs = survey.profile.machine, survey.costs
    saved = read_plan(survey.config.harmony.plan)
    if saved is None:
        choice = search(survey.graph, costs, rates, survey.element, survey.request)[0]
    elif profile is not None and saved.policy.resident:
        raise ConfigError("a plan with resident packs is checked on the device: leave --profile away.")
    else:
        choice = adopt(saved, survey.graph, costs, rates, survey.element, survey.request)
    names = tuple(layer.name for layer in survey.graph.layers)
    return choice, trace_of(choice.plan, choice.prediction, costs, layer_names=names)


def _executed(subject: Subject, config: Config, steps: int) -> tuple[Choice, dict[str, Any], ExecutedStep]:
    engine, *_ = initialize(model=subject.model, config=config.raw)
    try:
        for _ in range(_WARM_UP):
            engine.train_batch(repeat(subject.inputs))
        with engine.record_steps() as recorded:
            for _ in range(steps):
                engine.train_batch(repeat(subject.inputs))
        middle = statistics.median_low(step.step_ms for step in recorded)
        shown = next(step for step in recorded if step.step_ms == middle)
        return engine.plan_report().choices[0], engine.trace(shown), shown
    finally:
        engine.destroy()


def _table(simulated: Mapping[str, Any], executed: Mapping[str, Any] | None) -> str:
    """Return milliseconds by stream, and of the whole step."""
    sides = [{**side["busy_ms"], _STEP: side["step_ms"]} for side in (simulated, executed) if side is not None]
    rows = []
    for name in sides[0]:
        times = [side.get(name, 0.0) for side in sides]
        error = [f"{times[0] / times[1] - 1:+.0%}" if times[1] else ""] if len(times) > 1 else []
        if any(times):
            rows.append([name.replace("_", " "), *(f"{ms:,.1f}" for ms in times), *error])
    return columns(("busy, ms of one step", "simulated", "executed", "error")[: len(rows[0])], rows)
