"""Answer `harmony-ds estimate` and `harmony-ds plan`: make a forecast, or say what is missing and what to do; print it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from harmony_ds.cli.options import ON_DISK, WEIGHTS_ON_DISK, config_of
from harmony_ds.cli.progress import tell
from harmony_ds.config import Config, load_config
from harmony_ds.config.check import MICRO_BATCH, STEPS
from harmony_ds.config.read import with_values
from harmony_ds.errors import ConfigError, DoesNotFitError
from harmony_ds.estimate.forecast import Forecast, changes, forecast, forecast_under, joining
from harmony_ds.estimate.survey import Survey, smallest_peak_bytes
from harmony_ds.estimate.text import wrapped
from harmony_ds.scheduler.grid import amount, counted
from harmony_ds.scheduler.joining import Advice
from harmony_ds.scheduler.sizes import Sizes
from harmony_ds.scheduler.swaps import lower_bound_bytes
from harmony_ds.scheduler.tiles import Tiles

DOES_NOT_FIT, _LABEL = 3, 13
SurveyUnder = Callable[[Config], Survey]
"""Function of a command that surveys the model on its machine under a ds_config."""
_BF16_STATE = {"bf16.enabled": True, "bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}
_LESS_ON_HOST: tuple[tuple[Mapping[str, object], str], ...] = (
    ({"harmony.split_masters": True}, " (the same bits)"),
    ({"harmony.stash": "device"}, " (the same bits)"),
    (ON_DISK, " (the same bits, at the pace of a disk)"),
    (WEIGHTS_ON_DISK, " (the same bits, at the pace of a disk)"),
    ({"data_types.grad_accum_dtype": "bf16"}, " (which rounds sums of gradients)"),
    ({"gradient_clipping": 0}, ""),
    ({"optimizer.type": "Lion"}, " (another optimizer)"),
)
"""Values of a ds_config that may need less host memory, each with a remark: the ones that change least come first."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Shortage of device or host memory, with ways out of it: the one that costs least comes first.

    Attributes:
        set_aside_bytes: of the device's memory, what is left to libraries and the allocator beside `budget_bytes`.
    """

    what: str
    needed_bytes: int
    budget_bytes: int
    ways_out: tuple[str, ...]
    set_aside_bytes: int = 0

    def __str__(self) -> str:
        whole = self.budget_bytes + self.set_aside_bytes
        aside = f" (of {amount(whole)}, {amount(self.set_aside_bytes)} are left to CUDA's libraries and the allocator)"
        return (
            f"does not fit: {amount(self.needed_bytes)} of {self.what} are needed and {amount(self.budget_bytes)} may be "
            f"used{aside if self.set_aside_bytes else ''}: {amount(self.needed_bytes - self.budget_bytes)} too many"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found out about a model on a machine.

    Attributes:
        forecast: how the model trains; None: no plan fits the device.
        changes: tokens or samples per second after each of several changes, by what is changed; empty: not asked for.
        lack: the memory that is short; None: everything fits.
        joining: advice to join layer calls of several micro-batches, if that would be much faster.
    """

    survey: Survey
    forecast: Forecast | None
    changes: Mapping[str, float] = field(default_factory=dict)
    lack: Lack | None = None
    joining: Advice | None = None

    def to_json(self) -> dict[str, Any]:
        survey = self.survey
        policy, parameters = survey.request.policy, survey.graph.parameters
        data: dict[str, Any] = {
            "model": survey.subject.name,
            "machine": survey.profile.machine.name,
            "parameters": sum(spec.numel for spec in parameters),
            "trainable_parameters": sum(spec.numel for spec in parameters if spec.trainable),
            "layer_calls": len(survey.graph.calls),
            "micro_batch": survey.config.micro_batch,
            "accumulation": survey.config.gradient_accumulation_steps,
            "devices": policy.devices * policy.pipeline,
            "processes": policy.devices,
            "fits": self.lack is None,
            "lack": None if self.lack is None else asdict(self.lack),
        }
        if self.forecast is not None:
            data |= _forecast_json(self.forecast)
            data["changes"] = dict(self.changes)
            data["joining"] = None if self.joining is None else asdict(self.joining)
        return data


def _forecast_json(now: Forecast) -> dict[str, Any]:
    unit = now.survey.subject.unit
    return {
        "step_ms": now.prediction.step_ms,
        f"{unit}_per_step": now.items_per_step,
        f"{unit}_per_s": now.items_per_s,
        "bottleneck": now.prediction.bottleneck,
        "busy_share": dict(now.busy_share),
        "device_peak_bytes": now.plan.peak_bytes,
        "device_reserved_bytes": now.choice.reserved_bytes,
        "device_budget_bytes": now.survey.request.budget_bytes,
        "host_bytes": dict(now.host_bytes),
        "host_budget_bytes": now.host_budget_bytes,
        "disk_bytes": now.disk_bytes,
        "swaps": asdict(now.prediction.swaps),
        "lower_bound_bytes": lower_bound_bytes(now.plan),
        "zero3_offload_bytes": now.zero3_offload_bytes,
        "packs": len(now.plan.packing.backward),
        "policy": asdict(now.plan.policy),
        "reason": now.choice.reason,
    }


def answer(
    args: argparse.Namespace,
    survey_under: SurveyUnder,
    host_bytes: int | None,
    survey_with_nf4: SurveyUnder | None = None,
) -> Answer:
    """Survey the model, forecast its training, and return the answer of `estimate` or `plan`.

    Args:
        args: the options of the command.
        survey_under: surveys the model on the command's machine.
        host_bytes: the machine's host memory, if the options name no other; None: not known.
        survey_with_nf4: surveys it with the frozen weights beside adapters in 4 bits; None: there are none, or they are.
    """
    config = config_of(args, args.processes)
    host_bytes = int(args.host_memory_gib * 2**30) if args.host_memory_gib else host_bytes

    def survey_of(config: Config) -> Survey:
        return survey_under(config).among(args.processes)

    tell(f"measuring {args.model} ...")
    survey = survey_of(config)
    tell("searching for the fastest plan ...")
    try:
        now = forecast(survey, host_bytes)
    except DoesNotFitError:
        assert survey.request.budget_bytes is not None
        budget = survey.request.budget_bytes + survey.fragment_bytes
        needed = smallest_peak_bytes(survey)
        ways = tuple(_ways_to_less_on_device(config, needed, budget, survey_of))
        if survey_with_nf4 is not None:
            ways = (*_quantizing_on_device(survey_with_nf4(config), needed), *ways)
        aside = (config.harmony.budget_bytes or survey.profile.machine.device_bytes or budget) - budget
        return Answer(survey, None, lack=Lack("device memory", needed, budget, ways, max(0, aside)))
    lack = None
    if now.host_missing_bytes and host_bytes is not None:
        ways = tuple(_ways_to_less_on_host(now))
        if survey_with_nf4 is not None:
            ways = (*_quantizing_on_host(survey_with_nf4(config).among(args.processes), now), *ways)
        lack = Lack("host memory", now.host_total_bytes, host_bytes, ways)
    if not args.advice:
        return Answer(survey, now, lack=lack)
    tell("searching for changes that would help ...")
    return Answer(survey, now, changes(now), lack, joining(now))


def _ways_to_less_on_device(
    config: Config, needed_bytes: int, budget_bytes: int, survey_of: SurveyUnder
) -> Iterator[str]:
    """Yield what helps where the device's memory does not suffice: first the largest micro-batch that fits."""
    rows, peak_bytes = config.micro_batch, needed_bytes
    while rows > 1 and peak_bytes > budget_bytes:
        rows = max(1, min(rows // 2, rows * budget_bytes // peak_bytes))  # bytes grow with the rows
        peak_bytes = smallest_peak_bytes(survey_of(replace(config, micro_batch=rows)))
    if peak_bytes <= budget_bytes:
        yield f"a micro-batch of {rows} rows (--micro-batch {rows}), which needs {amount(peak_bytes)} at least"
    yield f"at least {amount(needed_bytes)} of device memory (--device-memory-gib, harmony.device_memory_gib)"
    yield "shorter rows (--sequence), or smaller layers (harmony.layers)"


def _quantizing_on_device(quantized: Survey, needed_bytes: int) -> Iterator[str]:
    """Yield what frozen weights in 4 bits save of the device's memory, if they do; `needed_bytes`: as they are."""
    peak_bytes = smallest_peak_bytes(quantized)
    if peak_bytes < needed_bytes:
        yield f"--base nf4 (frozen weights in 4 bits), which needs {amount(peak_bytes)} at least"


def _quantizing_on_host(quantized: Survey, now: Forecast) -> Iterator[str]:
    """Yield what frozen weights in 4 bits save of host memory, if they do."""
    try:
        saved_bytes = now.host_total_bytes - forecast(quantized, now.host_budget_bytes).host_total_bytes
    except DoesNotFitError:
        return
    if saved_bytes > 0:
        enough = "enough" if saved_bytes >= now.host_missing_bytes else "not enough alone"
        yield f"--base nf4 (frozen weights in 4 bits): {amount(saved_bytes)} less, {enough}"


def _ways_to_less_on_host(now: Forecast) -> Iterator[str]:
    """Yield what helps where host memory does not suffice: settings that suffice alone, other settings, more memory.

    Each setting is tried by itself, by a forecast under a ds_config that has it.
    """
    missing_bytes = now.host_missing_bytes
    saved_bytes: dict[str, int] = {}  # by setting
    known = [now]
    for values, remark in _settings_with_less_on_host(now):
        changed = _forecast_with(known, values)
        if changed is not None:
            known.append(changed)
            setting = json.dumps(with_values({}, values))[1:-1] + remark  # as in a ds_config, without its braces
            saved_bytes[setting] = now.host_total_bytes - changed.host_total_bytes
    enough = [setting for setting, saved in saved_bytes.items() if saved >= missing_bytes]
    others = [setting for setting, saved in saved_bytes.items() if 0 < saved < missing_bytes]
    for setting in enough:
        yield f"{setting}: {amount(saved_bytes[setting])} less, enough"
    for setting in others:
        yield f"{setting}: {amount(saved_bytes[setting])} less, not enough alone"
    yield f"a host with {amount(now.host_total_bytes)} of memory for it (--host-memory-gib)"


def _settings_with_less_on_host(now: Forecast) -> Iterator[tuple[Mapping[str, object], str]]:
    """Yield values of a ds_config that may need less host memory than `now`, by path, each with a remark."""
    config = now.survey.config
    for values, remark in _LESS_ON_HOST:
        if "harmony.split_masters" in values and now.plan.policy.servers > 1:
            continue
        if "harmony.stash" in values and not now.host_bytes["stash"]:
            continue
        yield values, remark
    stage = config.values["zero_optimization.stage"] or 1  # 16-bit optimizer state asks for a stage
    yield {**_BF16_STATE, "zero_optimization.stage": stage}, " (which rounds every update)"
    yield {STEPS: config.gradient_accumulation_steps // 2}, ""


def _forecast_with(known: Sequence[Forecast], values: Mapping[str, object]) -> Forecast | None:
    """Return the forecast with `values` in the ds_config of the first of `known` (see `forecast_under`).

    None: they contradict that ds_config, or no plan fits.
    """
    config = known[0].survey.config
    # Options may have changed these:
    sizes = {MICRO_BATCH: config.micro_batch, STEPS: config.gradient_accumulation_steps}
    try:
        return forecast_under(known, load_config(config.raw, instead={**sizes, **values}))
    except (ConfigError, DoesNotFitError):
        return None


def reply(answer: Answer, as_json: bool, note: str) -> int:
    """Print the answer, with a note on the machine, and return the exit code: 0 if it fits, 3 if it does not."""
    if as_json:
        print(json.dumps(answer.to_json(), indent=1))
    else:
        _show(answer, f" ({note})" if note else "")
    return 0 if answer.lack is None else DOES_NOT_FIT


def _show(answer: Answer, note: str) -> None:
    survey, config, subject = answer.survey, answer.survey.config, answer.survey.subject
    policy, now, unit = survey.request.policy, answer.forecast, subject.unit
    parameters = sum(spec.numel for spec in survey.graph.parameters)
    print(f"{subject.name}, {parameters:,} parameters in {len(survey.graph.layers)} layers")
    print(wrapped(_trained_text(survey)))
    print(wrapped(f"on {survey.profile.machine.name}{note}"))
    rows, steps = config.micro_batch, config.gradient_accumulation_steps
    each = "" if policy.devices == 1 else f" in each of {policy.devices} processes"
    driven = "" if policy.pipeline == 1 else f", through a pipeline of {policy.pipeline} devices"
    items = subject.items * steps * policy.devices
    batches = f"{counted(steps, 'micro-batch')} of {counted(rows, 'row')}"
    long = f" of {subject.items // rows:,} tokens" if unit == "tokens" and not subject.items % rows else ""
    print(f"{batches}{long} in a step{each}{driven}: {items:,} {unit}")
    if now is not None:
        print()
        _show_forecast(now, unit)
    if answer.joining is not None:  # a key of the ds_config, which brings more than other hardware does
        print("\n" + wrapped(str(answer.joining)))
    helpful = {what: rate for what, rate in answer.changes.items() if now is not None and _helps(rate, now)}
    if now is not None and helpful:
        print("\nwhat would help most:")
        for what, rate in helpful.items():
            gain = round(rate / now.items_per_s - 1, 3) + 0.0
            print(f"  {what:<40} {_rate(rate):>12} {unit}/s  {gain:>+7.1%}")
    if answer.lack is not None:
        print("\n" + wrapped(str(answer.lack)))
        for number, way in enumerate(answer.lack.ways_out, 1):
            print(wrapped(f"  ({number}) {way}", "      "))


def _trained_text(survey: Survey) -> str:
    """Say how many parameters are trained and how, and what the others are stored as."""
    config, specs = survey.config, survey.graph.parameters
    trained = sum(spec.numel for spec in specs if spec.trainable)
    packed = [spec for spec in specs if spec.stored_bytes is not None]
    quantized = sum(spec.numel for spec in packed)
    plain = sum(spec.numel for spec in specs) - trained - quantized
    dtype = str(config.compute_dtype).removeprefix("torch.")
    optimizer = "the program's optimizer" if config.optimizer is None else config.optimizer.type
    clipped = f", gradients clipped at {config.gradient_clipping:g}" if config.gradient_clipping else ""
    parts = [f"{'all' if not plain + quantized else f'{trained:,}'} trained in {dtype} by {optimizer}{clipped}"]
    if quantized:
        nbytes = sum(spec.stored_bytes or 0 for spec in packed)
        parts.append(f"{quantized:,} frozen and quantized ({amount(nbytes)})")
    if plain:
        parts.append(f"{plain:,} frozen in {dtype}")
    if plain > quantized > 0:
        parts.append("only the weights of linear layers (torch.nn.Linear) are quantized, which experts often are not")
    return "; ".join(parts)


def _helps(rate: float, now: Forecast) -> bool:
    """Return whether a change to `rate` would be printed as more than +0.0 %."""
    return rate >= 1.0005 * now.items_per_s


def _show_forecast(now: Forecast, unit: str) -> None:
    """Print the forecast, one labelled paragraph for each thing that it says."""
    device = f"{amount(now.plan.peak_bytes)}{_bound(now.survey.request.budget_bytes)}: fits"
    if now.choice.reserved_bytes is not None:
        device += f"; torch's allocator has to reserve {amount(now.choice.reserved_bytes)}"
    _show_line("device", device)
    fits = "does not fit" if now.host_missing_bytes else "fits"
    kinds = ", ".join(f"{kind} {amount(nbytes)}" for kind, nbytes in now.host_bytes.items() if nbytes)
    _show_line("host", f"{amount(now.host_total_bytes)}{_bound(now.host_budget_bytes)}: {fits} ({kinds})")
    if now.disk_bytes:
        _show_line("disk", f"{amount(now.disk_bytes)} of what is offloaded to it")
    _show_line("plan", now.choice.reason)
    sizes = Sizes.from_policy(now.plan.policy)
    if sizes.cut:
        _show_line("pieces", str(sizes))
    tiles = Tiles.from_policy(now.plan.policy)
    if tiles.cut:
        _show_line("tiles", str(tiles))
    step_s, computing_share = now.prediction.step_ms / 1e3, 1 - now.prediction.idle_share
    rate = f"{_rate(now.items_per_s)} {unit}/s"
    _show_line("one step", f"{step_s:,.2f} s: {rate}, the device computes {computing_share:.0%} of the time")
    busy = ", ".join(
        f"{name.replace('_', ' ')} {share:.0%}" for name, share in now.busy_share.items() if share >= 0.005
    )
    _show_line("bottleneck", f"{now.prediction.bottleneck.replace('_', ' ')} (busy: {busy})")
    _show_line("swaps", _swaps_text(now))


def _rate(items_per_s: float) -> str:
    """Return a rate as people read it: images may take seconds each."""
    return f"{items_per_s:,.0f}" if items_per_s >= 10 else f"{items_per_s:.2g}"


def _show_line(label: str, text: str) -> None:
    """Print a label, and beside it a text that may take several lines."""
    print(wrapped(f"{label:<{_LABEL}}{text}", " " * _LABEL))


def _bound(budget_bytes: int | None) -> str:
    """Return the budget as it follows the bytes that are used of it."""
    return ", without a bound" if budget_bytes is None else f" of {amount(budget_bytes)}"


def _swaps_text(now: Forecast) -> str:
    """Say what a step moves between host and device, and between devices, and what ZeRO-3 offload would move."""
    swaps = now.prediction.swaps
    weights_and_gradients = swaps.weights_in + swaps.gradients_out
    stash = swaps.stash_in + swaps.stash_out
    if now.plan.policy.devices == 1 and not weights_and_gradients + stash + swaps.moved:
        return "none: this fits the device whole, and plain PyTorch does the same"
    text = f"{amount(weights_and_gradients)} of weights and gradients"
    if weights_and_gradients:
        text += f" = {weights_and_gradients / max(1, lower_bound_bytes(now.plan)):.2f} x the lower bound"
    text += f", {amount(stash)} of stash"
    if swaps.sent:
        text += f", {amount(swaps.sent)} to other devices"
    if swaps.moved:
        text += f", {amount(swaps.moved)} from device to device"
    if now.plan.policy.devices == 1:
        text += f"; ZeRO-3 offload moves {amount(now.zero3_offload_bytes)}"
    return text
