"""How long may a row be? The longest one that trains under each budget, with and without tiles of tokens.

    python -m benchmarks.context.run

A small Llama is trained with one row a micro-batch. What it needs for rows of 256 tokens, all of it on the device, is the
largest budget; the others are parts of that. Writes benchmarks/results/context.json and docs/images/context.png.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.common import MIB, ROOT, language_model, quiet, tokens, write_results
from benchmarks.training import Batch, Ours, sgd
from harmony_ds import DoesNotFitError

MICRO_BATCHES, VOCABULARY, REFERENCE = 8, 4096, 256
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
LENGTHS = [step * 2**exponent for exponent in range(1, 12) for step in (4, 5, 6, 7)]
"""From 8 to 14,336 tokens, four for each factor of two."""


def build() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    more = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTHS[-1], "tie_word_embeddings": False}
    return language_model("llama", **sizes, **more, num_key_value_heads=4)


def group_of(length: int) -> list[Batch]:
    return [*islice(tokens(VOCABULARY, 1, length), MICRO_BATCHES)]


def needed_bytes() -> int:
    """Return the device memory of a step with everything on the device."""
    run = Ours(build(), sgd, (1, MICRO_BATCHES), None, {"tokens": "off", "stash": "device"})
    run.step(group_of(REFERENCE))
    nbytes = run.engine.memory_report().device_peak_bytes
    run.close()
    return nbytes


def fits(length: int, budget: int, mode: str) -> bool:
    """Return whether rows of `length` tokens can be trained under `budget`: the engine measures one, and plans a step."""
    run = Ours(build(), sgd, (1, MICRO_BATCHES), budget, {"tokens": mode})
    try:
        run.engine(**group_of(length)[0])
    except DoesNotFitError:
        return False
    finally:
        run.close()
    return True


def longest(budget: int, mode: str, shortest: int) -> int:
    """Return the place in LENGTHS of the longest row that fits `budget`; `shortest`: one that is known to fit."""
    place = shortest
    while place + 1 < len(LENGTHS) and fits(LENGTHS[place + 1], budget, mode):
        place += 1
    return place


def train(length: int, budget: int, mode: str) -> dict[str, Any]:
    """Take a step with rows of `length` tokens; return how it was done."""
    run = Ours(build(), sgd, (1, MICRO_BATCHES), budget, {"tokens": mode})
    run.step(group_of(length))
    report, policy = run.engine.memory_report(), run.engine.plan.policy
    run.close()
    if report.device_peak_bytes > budget:
        raise RuntimeError(f"a step took {report.device_peak_bytes:,} bytes of {budget:,}")
    return {
        "budget_mib": round(budget / MIB, 2),
        "tokens": mode,
        "longest_row": length,
        "peak_bytes": report.device_peak_bytes,
        "planned_bytes": report.planned_peak_bytes,
        "tile_tokens": policy.tile_tokens,
        "crossing_on_host": policy.crossing_on_host,
    }


def draw(rows: list[dict[str, Any]], needed: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for mode, style, label in (("auto", "o-", 'in tiles where needed ("auto")'), ("off", "s--", 'whole calls ("off")')):
        of_mode = [row for row in rows if row["tokens"] == mode]
        axes.plot([row["budget_mib"] for row in of_mode], [row["longest_row"] for row in of_mode], style, label=label)
    axes.axvline(
        needed / MIB, color="black", linewidth=1, linestyle=":", label=f"all on the device, {REFERENCE} tokens"
    )
    axes.set(xlabel="device memory, MiB", ylabel="longest row, tokens", xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    quiet()
    needed = needed_bytes()
    rows = []
    for mode in ("off", "auto"):
        place = 0
        for share in SHARES:
            budget = int(share * needed)
            place = longest(budget, mode, place)
            rows.append(train(LENGTHS[place], budget, mode))
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    write_results("context", {"needed_bytes": needed, "reference_tokens": REFERENCE, "rows": rows})
    draw(rows, needed, ROOT / "docs" / "images" / "context.png")


if __name__ == "__main__":
    main()
