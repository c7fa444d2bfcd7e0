"""Answers of `estimate` and `plan`: a forecast, or why there is none and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from harmony_ds.cli.options import config_of, shape_of
from harmony_ds.cli.progress import progress
from harmony_ds.config import Config
from harmony_ds.errors import DoesNotFitError
from harmony_ds.estimate.forecast import Change, Forecast, Situation, changes, forecast, joining, smallest_peak_bytes
from harmony_ds.estimate.subject import BatchShape, Subject
from harmony_ds.estimate.survey import Survey, update_cost
from harmony_ds.scheduler.grid import amount
from harmony_ds.scheduler.joining import Advice

Resurvey = Callable[[int], Survey]
"""Surveys the same model with so many rows in a micro-batch."""
SurveyOf = Callable[[str, BatchShape, Config], tuple[Subject, Survey]]
"""Surveys a model with micro-batches of a shape on some machine."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Memory that does not suffice, and the ways out, the cheapest first."""

    what: str
    needed_bytes: int
    budget_bytes: int
    ways_out: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"does not fit: {amount(self.needed_bytes)} of {self.what} are needed and {amount(self.budget_bytes)} may "
            f"be used: {amount(self.needed_bytes - self.budget_bytes)} too many"
        )


@dataclass(frozen=True, slots=True)
class Case:
    """Question: a model with its ds_config on a machine, and host memory that may be used (None: not known)."""

    subject: Subject
    config: Config
    survey: Survey
    host_budget_bytes: int | None

    @property
    def situation(self) -> Situation:
        return Situation(self.survey, update_cost(self.config), self.host_budget_bytes, self.subject.items)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a case.

    Attributes:
        forecast: None where no plan fits the device.
        joining: joined layer calls that would be much faster.
        alone: the forecast of one device, where the question was about several.
    """

    case: Case
    forecast: Forecast | None
    changes: tuple[Change, ...] = ()
    lack: Lack | None = None
    joining: Advice | None = None
    alone: Forecast | None = None

    @property
    def fits(self) -> bool:
        return self.lack is None

    def to_json(self) -> dict[str, Any]:
        survey, unit = self.case.survey, self.case.subject.unit
        policy, parameters = survey.request.policy, survey.graph.parameters
        data: dict[str, Any] = {
            "model": self.case.subject.name,
            "machine": survey.profile.machine.name,
            "parameters": sum(spec.numel for spec in parameters),
            "trainable_parameters": sum(spec.numel for spec in parameters if spec.trainable),
            "layer_calls": len(survey.graph.calls),
            "micro_batch": self.case.config.micro_batch,
            "accumulation": self.case.config.gradient_accumulation_steps,
            "devices": policy.devices * policy.pipeline,
            "processes": policy.devices,
            "fits": self.fits,
            "lack": None if self.lack is None else asdict(self.lack),
        }
        if self.forecast is not None:
            data |= _forecast_json(self.forecast, unit)
            data["changes"] = [asdict(change) for change in self.changes]
            data["joining"] = None if self.joining is None else asdict(self.joining)
        if self.alone is not None:
            data[f"{unit}_per_s_of_one_device"] = self.alone.items_per_s
        return data


def _forecast_json(now: Forecast, unit: str) -> dict[str, Any]:
    return {
        "step_ms": now.prediction.step_ms,
        f"{unit}_per_step": now.items_per_step,
        f"{unit}_per_s": now.items_per_s,
        "bottleneck": now.bottleneck,
        "busy_share": dict(now.busy_share),
        "device_peak_bytes": now.plan.peak_bytes,
        "device_budget_bytes": now.device_budget_bytes,
        "host_bytes": dict(now.host_bytes),
        "host_budget_bytes": now.host_budget_bytes,
        "swaps": asdict(now.prediction.swaps),
        "lower_bound_bytes": now.lower_bound_bytes,
        "zero3_offload_bytes": now.zero3_offload_bytes,
        "packs": len(now.plan.packing.backward),
        "policy": asdict(now.plan.policy),
        "reason": now.choice.reason,
    }


def answer_of(args: argparse.Namespace, survey_of: SurveyOf, host_bytes: int | None) -> Answer:
    """Answer `estimate` or `plan`; `host_bytes` are the machine's, unless the options name others."""
    config = config_of(args, args.processes)
    with progress(f"measuring {args.model}"):
        subject, survey = survey_of(args.model, shape_of(args, config), config)

    def resurvey(rows: int) -> Survey:
        return survey_of(args.model, BatchShape(rows, args.sequence), config)[1].among(args.processes)

    host_bytes = int(args.host_memory_gib * 2**30) if args.host_memory_gib else host_bytes
    one = Case(subject, config, survey, host_bytes)
    found = answer(replace(one, survey=survey.among(args.processes)), resurvey, args.advice)
    if survey.request.policy.pipeline > 1:
        config = replace(config, harmony=replace(config.harmony, devices=1))
        one = replace(one, survey=survey_of(args.model, shape_of(args, config), config)[1])
    elif args.processes == 1:
        return found
    try:
        return replace(found, alone=forecast(one.situation))
    except DoesNotFitError:
        return found


def answer(case: Case, resurvey: Resurvey, advise: bool) -> Answer:
    """Search for the plan, and for changes that would help if `advise`."""
    situation = case.situation
    try:
        with progress("searching for the fastest plan"):
            now = forecast(situation)
    except DoesNotFitError:
        budget = case.survey.request.budget_bytes
        assert budget is not None
        needed = smallest_peak_bytes(case.survey)
        ways = tuple(_ways_to_less_on_device(case, needed, budget, resurvey))
        return Answer(case, None, lack=Lack("device memory", needed, budget, ways))
    lack = None
    if now.host_missing_bytes and case.host_budget_bytes is not None:
        ways = tuple(_ways_to_less_on_host(case, now))
        lack = Lack("host memory", now.host_total_bytes, case.host_budget_bytes, ways)
    with progress("searching for changes that would help"):
        if not advise:
            return Answer(case, now, lack=lack)
        return Answer(case, now, changes(situation, now), lack, joining(case.survey, now.choice))


def _ways_to_less_on_device(case: Case, needed: int, budget: int, resurvey: Resurvey) -> Iterator[str]:
    rows = case.config.micro_batch
    while rows > 1:
        rows //= 2
        peak = smallest_peak_bytes(resurvey(rows))
        if peak <= budget:
            yield f"a micro-batch of {rows} rows (--micro-batch {rows}), which needs {amount(peak)} at least"
            break
    yield f"at least {amount(needed)} of device memory (--device-memory-gib, harmony.device_memory_gib)"
    yield "shorter rows (--sequence), or smaller layers (harmony.layers)"


def _ways_to_less_on_host(case: Case, now: Forecast) -> Iterator[str]:
    """Yield settings that need less, those that suffice alone first; then more memory."""
    missing = now.host_missing_bytes
    saved = {way: nbytes for way, nbytes in _savings(case, now).items() if nbytes > 0}
    for way in sorted(saved, key=lambda way: (saved[way] < missing, -saved[way])):
        enough = "enough" if saved[way] >= missing else "not enough alone"
        yield f"{way}: {amount(saved[way])} less, {enough}"
    yield f"{amount(now.host_total_bytes)} of host memory"


_BF16_STATE = (
    '"bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true} (16-bit state, which '
    "rounds every update)"
)


def _savings(case: Case, now: Forecast) -> Mapping[str, int]:
    config, plan, gradients = case.config, now.plan, now.host_bytes["gradients"]
    saved: dict[str, int] = {}
    if config.accumulation_dtype.itemsize > config.compute_dtype.itemsize:
        saved['"data_types": {"grad_accum_dtype": "bf16"}'] = gradients // 2
    if config.deferred_update and config.loss_scale is None:
        largest = plan.policy.devices * max(plan.packs[index].piece_bytes() for index in plan.packing.backward)
        saved['"gradient_clipping": 0'] = gradients - config.harmony.gradient_slabs * largest
    if config.compute_dtype != config.master_dtype and config.loss_scale is None:
        half = now.host_bytes["optimizer"] // 2 + (gradients // 2 if config.accumulation_dtype.itemsize == 4 else 0)
        saved[_BF16_STATE] = now.host_bytes["masters"] + half
        if config.master_bytes == 4 and config.compute_dtype.itemsize == 2:
            saved['"harmony": {"split_masters": true} (the same bits)'] = now.host_bytes["masters"] // 2
    if update_cost(config).states == 2:
        elements = sum(spec.numel for spec in case.survey.graph.parameters if spec.trainable)
        saved['"optimizer": {"type": "Lion"}'] = 4 * elements
    if now.host_bytes["stash"]:
        saved["half the micro-batches in a step (--accumulation)"] = now.host_bytes["stash"] // 2
        saved['"harmony": {"stash": "device"}'] = _saved_by_stash_on_device(case, now)
    return saved


def _saved_by_stash_on_device(case: Case, now: Forecast) -> int:
    request = case.survey.request
    survey = replace(case.survey, request=replace(request, settings=replace(request.settings, stash="device")))
    try:
        return now.host_total_bytes - forecast(replace(case.situation, survey=survey)).host_total_bytes
    except DoesNotFitError:
        return 0
