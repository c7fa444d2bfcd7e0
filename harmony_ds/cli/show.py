"""Answers on a terminal."""

from __future__ import annotations

import json

from harmony_ds.cli.answer import Answer
from harmony_ds.estimate.forecast import Forecast, name_of
from harmony_ds.estimate.text import labelled, wrapped
from harmony_ds.scheduler.grid import amount
from harmony_ds.scheduler.sizes import WHOLE, Sizes

DOES_NOT_FIT = 3


def reply(answer: Answer, as_json: bool, note: str = "") -> int:
    """Print the answer, with a note on the machine, and return the exit code: 0 if it fits, 3 if it does not."""
    if as_json:
        print(json.dumps(answer.to_json(), indent=1))
    else:
        _show(answer, f" ({note})" if note else "")
    return 0 if answer.fits else DOES_NOT_FIT


def _show(answer: Answer, note: str) -> None:
    survey, config, subject = answer.case.survey, answer.case.config, answer.case.subject
    policy, now, unit = survey.request.policy, answer.forecast, answer.case.subject.unit
    parameters = sum(spec.numel for spec in survey.graph.parameters)
    print(f"{subject.name}, {_count(parameters)} parameters in {len(survey.graph.layers)} layers")
    print(wrapped(f"on {survey.profile.machine.name}{note}"))
    rows, steps = config.micro_batch, config.gradient_accumulation_steps
    each = "" if policy.devices == 1 else f" in each of {policy.devices} processes"
    driven = "" if policy.pipeline == 1 else f", through a pipeline of {policy.pipeline} devices"
    items = subject.items * steps * policy.devices
    print(f"{steps} micro-batches of {rows} row{'s' * (rows > 1)} in a step{each}{driven}: {items:,} {unit}\n")
    if now is not None:
        _show_forecast(now, unit)
    if now is not None and answer.alone is not None:
        alone, devices = answer.alone.items_per_s, policy.devices * policy.pipeline
        print(labelled("alone", f"one device: {alone:,.0f} {unit}/s; {devices}: {now.items_per_s / alone:.2f} x"))
    if now is not None and answer.changes:
        print("\nwhat would help most:")
        for change in answer.changes:
            gain = change.items_per_s / now.items_per_s - 1
            print(f"  {change.what:<40} {change.items_per_s:>12,.0f} {unit}/s  {gain:>+7.1%}")
    if answer.joining is not None:
        print("\n" + wrapped(str(answer.joining)))
    if answer.lack is not None:
        print("\n" + wrapped(str(answer.lack)))
        for number, way in enumerate(answer.lack.ways_out, 1):
            print(wrapped(f"  ({number}) {way}", "      "))


def _show_forecast(now: Forecast, unit: str) -> None:
    device, host = _budget(now.device_budget_bytes), _budget(now.host_budget_bytes)
    fits = "does not fit" if now.host_missing_bytes else "fits"
    kinds = ", ".join(f"{kind} {amount(nbytes)}" for kind, nbytes in now.host_bytes.items() if nbytes)
    busy = ", ".join(f"{name_of(name)} {share:.0%}" for name, share in now.busy_share.items() if share >= 0.005)
    swaps, sizes = now.prediction.swaps, Sizes.of(now.plan.policy)
    moved, stash = swaps.weights_in + swaps.gradients_out, swaps.stash_in + swaps.stash_out
    versus = "" if now.plan.policy.devices > 1 else f"; ZeRO-3 offload moves {amount(now.zero3_offload_bytes)}"
    between = f", {amount(swaps.sent)} to other devices" if swaps.sent else ""
    between += f", {amount(swaps.moved)} from device to device" if swaps.moved else ""
    lines = {
        "device": f"{amount(now.plan.peak_bytes)} of {device}: fits",
        "host": f"{amount(now.host_total_bytes)} of {host}: {fits} ({kinds})",
        "plan": now.choice.reason,
        **({} if sizes == WHOLE else {"pieces": str(sizes)}),
        "one step": f"{_seconds(now.prediction.step_ms)}: {now.items_per_s:,.0f} {unit}/s, the device computes "
        f"{1 - now.prediction.idle_share:.0%} of the time",
        "bottleneck": f"{name_of(now.bottleneck)} (busy: {busy})",
        "swaps": f"{amount(moved)} of weights and gradients = {moved / max(1, now.lower_bound_bytes):.2f} x the lower "
        f"bound, {amount(stash)} of stash{between}{versus}",
    }
    for label, text in lines.items():
        print(labelled(label, text))


def _budget(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else amount(nbytes)


def _seconds(ms: float) -> str:
    return f"{ms / 1e3:,.2f} s" if ms >= 1e3 else f"{ms:,.1f} ms"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e8 else f"{number / 1e6:,.2f} million"
