"""Regenerates docs/vldb22.md: Harmony's published schedules simulated and improved upon, under its own cost model.

python benchmarks/vldb22/run.py [--models gpt2_medium ...] [--out docs/vldb22.md]
"""

from __future__ import annotations

import argparse
import gc
import time
from functools import cache
from pathlib import Path

from benchmarks.vldb22.ours import scaled, section
from benchmarks.vldb22.planner.compose import compose
from benchmarks.vldb22.planner.graph import Mode, Setup
from benchmarks.vldb22.planner.machine import HARMONY_VLDB22
from benchmarks.vldb22.planner.search import Answer, Question, search
from benchmarks.vldb22.planner.simulate import simulate
from benchmarks.vldb22.planner.volumes import count_volumes
from benchmarks.vldb22.reference import LARGEST, Shipped, costs_of, shipped
from benchmarks.vldb22.report import Row, Scaling, report

_DOCS = Path(__file__).parents[2] / "docs" / "vldb22.md"
SCALED = "gpt2_10b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(LARGEST), default=list(LARGEST))
    parser.add_argument("--out", type=Path, default=_DOCS)
    arguments = parser.parse_args()
    gc.disable()
    begin = time.process_time()
    rows = [row for model in arguments.models for case in shipped(model) for row in rows_of(case)]
    scalings = scale() if SCALED in arguments.models else []
    own = f"\n{section([scaled(devices) for devices in range(1, 9)])}" if SCALED in arguments.models else ""
    arguments.out.write_text(report(rows, scalings, time.process_time() - begin) + own)
    print(f"{arguments.out} written in {time.process_time() - begin:.0f} s")


def rows_of(case: Shipped) -> list[Row]:
    costs = costs_of(case.model)
    differences = tuple(case.differences(count_volumes(compose(case.setup, case.schedule), costs)))
    rows = []
    for overlap in (False, True):
        simulated = simulate(case.setup, case.schedule, costs, HARMONY_VLDB22, overlap)
        answer = _best(case.model, Question(case.setup, overlap, case.cap_bytes(costs), *LARGEST[case.model]))
        rows.append(Row(case, overlap, simulated.time_ms / 1000, differences, answer))
        print(f"{case.model} {case.name} {'overlapped' if overlap else 'serial'}: {answer.time_ms / 1000:.2f} s")
    return rows


def scale() -> list[Scaling]:
    """One to eight devices, with the packs that were shipped for all of them and with the best found in their memory."""
    case = next(case for case in shipped(SCALED) if case.setup == Setup(Mode.PIPELINE, 4, 32))
    costs = costs_of(SCALED)
    scalings = []
    for mode in Mode:
        for devices in range(1, 9):
            setup = Setup(mode, devices, case.setup.batch)
            time_ms = simulate(setup, case.schedule, costs, HARMONY_VLDB22, overlap=True).time_ms
            answer = _best(SCALED, Question(setup, True, case.cap_bytes(costs), *LARGEST[SCALED]))
            scalings.append(Scaling(setup, time_ms, answer))
            print(f"{SCALED} {mode.value} on {devices}: {answer.time_ms / 1000:.2f} s")
    return scalings


@cache
def _best(model: str, question: Question) -> Answer:
    gc.collect()  # between searches instead of within: each makes hundreds of thousands of jobs and hardly a circle
    answer = search(question, costs_of(model), HARMONY_VLDB22)
    assert answer is not None, "the shipped schedule fits, so something does"
    return answer


if __name__ == "__main__":
    main()
