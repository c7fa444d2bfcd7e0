"""Harmony's published schedules: the original's estimates reproduced, and beaten by the engine's own planner.

    python -m benchmarks.vldb22.run [--models gpt2_medium ...] [--page]

Writes benchmarks/results/vldb22.json, and with --page docs/vldb22.md from what is there already.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.vldb22.cost_model.jobs import HARMONY_VLDB22, step_ms
from benchmarks.vldb22.cost_model.schedule import Schedule, Setup
from benchmarks.vldb22.planned import Question, Units, capacity_bytes, cut, improved, plan, searched, timed
from benchmarks.vldb22.reference import LARGEST, LAST_PROFILED, Shipped, costs_of, profile_of, shipped

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "vldb22.json", ROOT / "docs" / "vldb22.md"
OWN, SAMPLES, BUDGET_BYTES = "gpt2_10b", 32, 10 * 2**30
"""What is planned for one to eight devices; the budget is the original's default for a card of 11 GiB."""
Content = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(LARGEST), default=list(LARGEST))
    parser.add_argument("--page", action="store_true", help="only write the page, from the results")
    given = parser.parse_args()
    if not given.page:
        begin = time.process_time()
        rows = [row for model in given.models for row in rows_of(model)]
        own = [own_plan(devices) for devices in (1, 2, 4, 8)] if OWN in given.models else []
        content = {"seconds": round(time.process_time() - begin), "rows": rows, "own": own}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


def rows_of(model: str) -> Iterator[Content]:
    """Yield what was found for each schedule that the original ships for a model."""
    cases = sorted(shipped(model), key=lambda case: (_kind(case.setup), _cap(case)))
    for _, same in groupby(cases, key=lambda case: _kind(case.setup)):
        pool: dict[Schedule, float] = {}
        for case in same:  # of growing memory: what fits the one before fits this one
            yield row(case, pool)


def row(case: Shipped, pool: dict[Schedule, float]) -> Content:
    """Compare a shipped schedule, simulated here, with the original's estimates and the engine's best proposal.

    Args:
        pool: proposals for the same devices and samples in less memory, and their ms; the engine is asked for more where
            none is as fast.
    """
    costs, cap = costs_of(case.model), _cap(case)
    simulated = [step_ms(case.setup, case.schedule, costs, HARMONY_VLDB22, overlap) for overlap in (False, True)]
    begin = time.process_time()
    question = Question(profile_of(case.model), case.setup, LARGEST[case.model], cap)
    for proposals in (cut, searched):
        best = min(pool, key=pool.__getitem__, default=None)
        if best is not None and pool[best] <= simulated[True]:
            break
        pool.update(timed(question, {*proposals(question)}.difference(pool)))
        pool.update(improved(question, pool))
    best = min(pool, key=pool.__getitem__)
    assert capacity_bytes(costs, best) <= cap
    found = {
        "model": case.model,
        "name": case.name,
        "mode": case.setup.mode.value,
        "devices": case.setup.devices,
        "samples": case.setup.batch,
        "cap_bytes": cap,
        "published": str(case.schedule),
        "published_s": case.time_s,
        "simulated_s": [ms / 1000 for ms in simulated],
        "bytes_that_differ": case.differences(),
        "is_profiled": case.schedule.forward_micro_batch <= LAST_PROFILED,
        "found": str(best),
        "found_s": pool[best] / 1000,
        "search_s": time.process_time() - begin,
    }
    print(case.model, case.name, f"{simulated[True] / 1000:.2f} s, found {best}: {pool[best] / 1000:.2f} s", flush=True)
    return found


def _kind(setup: Setup) -> tuple[str, int, int]:
    return setup.mode.value, setup.devices, setup.batch


def _cap(case: Shipped) -> int:
    return capacity_bytes(costs_of(case.model), case.schedule)


def own_plan(devices: int) -> Content:
    """Return the engine's plan for so many devices that one process drives, by its own simulator."""
    begin = time.process_time()
    every = [(size, plan(profile_of(OWN), Units(size, size), SAMPLES, devices, BUDGET_BYTES)) for size in (1, 2)]
    size, best = min(every, key=lambda one: one[1].prediction.step_ms)
    return {
        "devices": devices,
        "unit": size,
        "plan": best.reason,
        "peak_bytes": best.plan.peak_bytes,
        "step_s": best.prediction.step_ms / 1000,
        "search_s": time.process_time() - begin,
    }


# ---- the page

_HEAD = """# Harmony's published schedules

<!-- written by `python -m benchmarks.vldb22.run --page` -->

How close is this engine's planner to the schedules that Harmony's authors (VLDB'22) published? Everything here is an
**estimate, not a measurement**: per-layer profiles of a GTX 1080 Ti (`benchmarks/vldb22/data`), and the constants of
the original's scheduler (11.5 GiB/s between host and devices, shared; 8.2 GiB/s between two devices; 40 ms to free a
task). `python -m benchmarks.vldb22.run` makes this page; its searches took {seconds:,} s of one core.

## In the original's cost model

- **Times:** the {count} published schedules, simulated without and with overlap, come out within {error:.2f} % of the
  original's estimates ({inside:.4f} % where their micro-batches are within the profile).
- **Bytes:** {differing}.
- **Schedules:** for sizes of layer calls from one sample up, forward and backward, the engine proposes the ways to cut
  that its search begins with, packs as full as fits, and what the search's small changes make of the best of them, judged
  by the original's model; where none is as fast, also the ten best plans of its search. The fastest that fits the memory
  of the published schedule's largest pack, by its formula, takes {least:.1f} to {most:.1f} % less time than that
  (median {median:.1f} %), and more for {slower} of {count}.

A row is all published schedules for so many devices and samples (D); vDP is data parallel, vPP a pipeline.

| model | mode | devices | D | schedules | published s | less % |
|---|---|---|---|---|---|---|
"""
_OWN = """
## By the engine's own simulator

What `"harmony": {{"devices": N}}` would run: GPT2-10B, {samples} samples, 10 GiB a device.

| N | samples a call | packs | step s | speed-up |
|---|---|---|---|---|
"""


def page(content: Content) -> str:
    """Return docs/vldb22.md."""
    rows = content["rows"]
    gains = sorted(map(_gain, rows))
    errors = [(max(abs(a / b - 1) for a, b in zip(*_times(row), strict=True)), row["is_profiled"]) for row in rows]
    different = [row["name"] for row in rows if row["bytes_that_differ"]]
    text = _HEAD.format(
        seconds=content["seconds"],
        count=len(rows),
        error=100 * max(error for error, _ in errors),
        inside=100 * max(error for error, profiled in errors if profiled),
        differing=f"differ in {different}" if different else "of every kind equal, byte for byte, in all of them",
        least=gains[0],
        most=gains[-1],
        median=gains[len(gains) // 2],
        slower=sum(gain < -1e-6 for gain in gains) or "none",
    )
    for (model, mode, devices, samples), group in groupby(rows, key=lambda row: tuple(row[name] for name in _KEYS)):
        same = list(group)
        published = _span([row["simulated_s"][True] for row in same])
        text += _line(model, mode, devices, samples, len(same), published, _span([*map(_gain, same)]))
    if content["own"]:
        text += _OWN.format(samples=SAMPLES)
        alone = content["own"][0]["step_s"]
        for one in content["own"]:
            speedup = f"{alone / one['step_s']:.2f}"
            text += _line(one["devices"], one["unit"], one["plan"].split(" packs")[0], f"{one['step_s']:.1f}", speedup)
    return text


_KEYS = ("model", "mode", "devices", "samples")


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def _times(row: Content) -> tuple[list[float], list[float]]:
    return row["simulated_s"], row["published_s"]


def _gain(row: Content) -> float:
    return float(round(100 * (1 - row["found_s"] / row["simulated_s"][True]), 6))


def _span(values: list[float]) -> str:
    low, high = f"{min(values) + 0.0:.1f}", f"{max(values) + 0.0:.1f}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main()
