"""The table of all cases: what is reserved, how often the allocator tries again, and what was planned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.allocator.case import Case, answer_with_replanning
from benchmarks.allocator.replay import Pools
from benchmarks.common import GIB, ROOT, put_table, write_results

DOCUMENT = ROOT / "docs" / "memory.md"
BEGIN = "<!-- table: python -m benchmarks.allocator --write -->"
HEAD = (
    "| model | step | GiB: budget | planned | reserved | without a limit | retries | s per step, predicted "
    "| retries, s when replanned |\n|---|---|---|---|---|---|---|---|---|"
)
_MODELS = Path(__file__).parents[1] / "models"
_TOKENS = 1024


def cases() -> Iterator[Case]:
    """Yield the cases: models of 3 and 8 billion parameters, 32 rows a step, cut in several ways, under several budgets."""
    small, large, gpt2 = (_MODELS / f"{name}.json" for name in ("llama-3b", "llama-8b", "gpt2-1.5b"))
    for model in (small, large):
        for rows in (1, 4, 8, 32):
            yield Case(model, rows, 32 // rows, _TOKENS, 24)
        yield Case(model, 8, 4, _TOKENS, 24, clip=1.0)
        yield Case(model, 8, 4, _TOKENS, 24, ragged=True)
        yield Case(model, 4, 8, _TOKENS, 16)
    yield Case(small, 1, 32, _TOKENS, 24, harmony={"micro_batch": "auto"})
    yield Case(small, 4, 8, _TOKENS, 10)
    yield Case(small, 2, 16, _TOKENS, 8)
    for gib in (8, 16):
        yield Case(gpt2, 4, 8, _TOKENS, gib)


def write_table(pools: Pools, expandable: bool, to_files: bool) -> None:
    """Print the table; `to_files`: and write it to the results and the documentation."""
    print(HEAD)
    rows: list[dict[str, Any]] = []
    for case in cases():
        rows.append(answer_with_replanning(case, pools, expandable))
        print(_line(case, rows[-1]), flush=True)
    if not to_files:
        return
    write_results("allocator", {"pools": pools.value, "expandable": expandable, "cases": rows})
    put_table(DOCUMENT, BEGIN, [HEAD, *(_line(case, row) for case, row in zip(cases(), rows, strict=True))])


def _line(case: Case, found: dict[str, Any]) -> str:
    step = f"{case.accumulation} x {case.rows} rows"
    for given, words in ((case.ragged, "ragged"), (case.clip, "clipping"), (case.harmony, "joined calls")):
        step += f", {words}" if given else ""
    retries = "out of memory" if found["out_of_memory"] else found["retries_a_step"]
    replanned = ""
    if times := found["times_replanned"]:
        seconds = found["predicted_step_ms_when_replanned"] / 1e3
        replanned = f"{found['retries_when_replanned']}, {seconds:.2f} ({times} x)"
    cells = [
        case.model.stem,
        step,
        f"{case.cap_gib:g}",
        f"{found['planned_peak_bytes'] / GIB:.2f}",
        f"{found['reserved_peak_bytes'] / GIB:.2f}",
        f"{found['reserved_without_cap_bytes'] / GIB:.2f}",
        str(retries),
        f"{found['predicted_step_ms'] / 1e3:.2f}",
        replanned,
    ]
    return f"| {' | '.join(cells)} |"
