"""Answers on a terminal."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from harmony_ds.cli.answer import Answer, Lack
from harmony_ds.cli.exits import DOES_NOT_FIT
from harmony_ds.forecast import STREAM_NAMES, Forecast
from harmony_ds.scheduler.grid import amount
from harmony_ds.scheduler.sizes import WHOLE, Sizes


def reply(answer: Answer, as_json: bool) -> None:
    """Prints the answer and ends the command: 0 where it fits, 3 where it does not."""
    if as_json:
        typer.echo(json.dumps(answer.to_json(), indent=1))
    else:
        _show(Console(highlight=False, soft_wrap=True), answer)
    raise typer.Exit(0 if answer.fits else DOES_NOT_FIT)


def _show(console: Console, answer: Answer) -> None:
    survey, config, subject = answer.case.survey, answer.case.config, answer.case.subject
    parameters = sum(spec.numel for spec in survey.graph.parameters)
    steps = config.gradient_accumulation_steps
    console.print(f"[bold]{subject.name}[/], {_count(parameters)} parameters in {len(survey.graph.layers)} layers")
    console.print(f"on {survey.profile.machine.name}")
    console.print(
        f"{steps} micro-batches of {config.micro_batch} rows in a step: {subject.items * steps:,} {subject.unit}\n"
    )
    if answer.forecast is not None:
        _show_forecast(console, answer.forecast, subject.unit)
    if answer.changes and answer.forecast is not None:
        console.print("\nwhat would help most:")
        for change in answer.changes:
            gain = change.items_per_s / answer.forecast.items_per_s - 1
            console.print(f"  {change.what:<40} {change.items_per_s:>12,.0f} {subject.unit}/s  {gain:>+7.1%}")
    if answer.lack is not None:
        _show_lack(console, answer.lack)


def _show_forecast(console: Console, now: Forecast, unit: str) -> None:
    device, host = _budget(now.device_budget_bytes), _budget(now.host_budget_bytes)
    fits = "does not fit" if now.host_missing_bytes else "fits"
    kinds = ", ".join(f"{kind} {amount(nbytes)}" for kind, nbytes in now.host_bytes.items() if nbytes)
    console.print(f"device       {amount(now.plan.peak_bytes)} of {device}: fits")
    console.print(f"host         {amount(now.host_total_bytes)} of {host}: {fits} ({kinds})")
    swaps = now.prediction.swaps
    moved = swaps.weights_in + swaps.gradients_out
    console.print(f"plan         {now.choice.reason}")
    sizes = Sizes.of(now.plan.policy)
    if sizes != WHOLE:
        console.print(f"pieces       {sizes}")
    console.print(
        f"one step     {_seconds(now.prediction.step_ms)}: [bold]{now.items_per_s:,.0f} {unit}/s[/], the device computes "
        f"{1 - now.prediction.idle_share:.0%} of the time"
    )
    busy = ", ".join(f"{STREAM_NAMES[name]} {share:.0%}" for name, share in now.busy_share.items() if share >= 0.005)
    console.print(f"bottleneck   [bold]{STREAM_NAMES[now.bottleneck]}[/] (busy: {busy})")
    stash = swaps.stash_in + swaps.stash_out
    console.print(
        f"swaps        {amount(moved)} of weights and gradients = {moved / max(1, now.lower_bound_bytes):.2f} x the lower "
        f"bound, {amount(stash)} of stash; ZeRO-3 offload moves {amount(now.zero3_offload_bytes)}"
    )


def _show_lack(console: Console, lack: Lack) -> None:
    console.print(f"\n[bold]{lack}[/]")
    for number, way in enumerate(lack.ways_out, 1):
        console.print(f"  ({number}) {way}", markup=False)


def _budget(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else amount(nbytes)


def _seconds(ms: float) -> str:
    return f"{ms / 1e3:,.2f} s" if ms >= 1e3 else f"{ms:,.1f} ms"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e8 else f"{number / 1e6:,.2f} million"
