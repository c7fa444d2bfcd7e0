"""Fig. 10: throughput as the batch grows: BERT, GPT-2, VGG and ResNet, grouped against swapping for each micro-batch.

python benchmarks/paper/fig10.py [--quick] [--rounds 3]
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from models import SMALL, Model
from runner import NAIVE, OURS, PLAIN, Content, Options, main, panels, span

from benchmarks.common import interleaved, ratio
from benchmarks.training import Ours, Plain, planned_bytes, sgd

TITLE = "Fig. 10: throughput against batch"
PAPER = (
    "BERT-96, GPT2-XL, VGG416 and ResNet1026, four GTX 1080 Ti; up to 7.6x over baselines with virtualised memory, whose "
    "code is not public. Swapping for each micro-batch takes their place here."
)
ROWS = {"BERT": 1, "GPT-2": 1, "VGG": 2, "ResNet": 2}
HEADROOM = 1.15
"""The budget, over the least device memory that a plan needs."""
_HARMONY = {"residency": "off"}  # so that nothing but grouping differs


def run(options: Options) -> Content:
    small = {"BERT": SMALL["BERT"], "VGG": SMALL["VGG"]} if options.quick else SMALL
    groups = (1, 4) if options.quick else (1, 4, 16)
    return {"measured": {name: measured(model, ROWS[name], groups, options.rounds) for name, model in small.items()}}


def measured(model: Model, rows: int, groups: tuple[int, ...], rounds: int) -> Content:
    """Return step times over plain PyTorch's, which has no limit; SGD, one thread each, updates finished."""
    budget = int(HEADROOM * planned_bytes(model.seeded(), sgd, model.batches(rows, max(groups)), rows))
    found: list[Content] = []
    for group in groups:
        batches = model.batches(rows, group)
        plain = Plain(model.seeded(), sgd)
        grouped = Ours(model.seeded(), sgd, (rows, group), budget, _HARMONY)
        alone = Ours(model.seeded(), sgd, (rows, 1), budget, _HARMONY)
        steps: dict[str, Any] = {
            "plain": lambda plain=plain, batches=batches: plain.step(batches),
            "grouped": lambda grouped=grouped, batches=batches: grouped.step(batches),
            "each_alone": lambda alone=alone, batches=batches: [alone.step([batch]) for batch in batches],
        }
        seconds = interleaved(steps, rounds)
        found.append(
            {
                "samples": rows * group,
                "micro_batches": group,
                "grouped_over_plain": ratio(seconds["grouped"], seconds["plain"]),
                "each_alone_over_plain": ratio(seconds["each_alone"], seconds["plain"]),
                "each_alone_over_grouped": ratio(seconds["each_alone"], seconds["grouped"]),
                "grouped_swap_bytes": grouped.engine.swap_report().swap_bytes,
                "each_alone_swap_bytes": group * alone.engine.swap_report().swap_bytes,
                "seconds": seconds,
            }
        )
        grouped.close()
        alone.close()
    return {"model": model.name, "budget_bytes": budget, "rows": found}


def draw(content: Content) -> Figure:
    entries = content["measured"].values()
    figure, axes = panels(*(f"MEASURED: {entry['model']}" for entry in entries), width=2.75, height=2.7)
    for one, entry in zip(axes, entries, strict=True):
        samples = [row["samples"] for row in entry["rows"]]
        one.axhline(1.0, color=PLAIN, linewidth=1, linestyle=":")
        for name, form, colour, label in (
            ("grouped", "o-", OURS, "grouped"),
            ("each_alone", "s--", NAIVE, "each micro-batch alone"),
        ):
            reached = [1 / row[f"{name}_over_plain"] for row in entry["rows"]]
            one.plot(samples, reached, form, color=colour, label=label)
        one.set(xlabel="samples in a step", xscale="log", ylim=(0, 1.25))
        one.set_xticks(samples, list(map(str, samples)))
        one.minorticks_off()
    axes[0].set_ylabel("throughput / plain PyTorch's,\nwhich has no memory limit")
    axes[0].legend(loc="lower right")
    return figure


def says(content: Content) -> str:
    last = {name: entry["rows"][-1] for name, entry in content["measured"].items()}
    reached = ", ".join(f"{name} {1 / row['grouped_over_plain']:.2f}" for name, row in last.items())
    alone = ", ".join(f"{name} {row['each_alone_over_grouped']:.2f}" for name, row in last.items())
    fewer = [row["each_alone_swap_bytes"] / row["grouped_swap_bytes"] for row in last.values()]
    noise = [entry["rows"][0]["each_alone_over_grouped"] for entry in content["measured"].values()]
    times = span(min(fewer), max(fewer), ".0f")
    return (
        f"Measured at {next(iter(last.values()))['micro_batches']} micro-batches, under {HEADROOM} times the memory of the "
        f"smallest plan. Share of plain PyTorch's throughput, which has no limit and recomputes nothing: {reached}. "
        f"Swapping for each micro-batch takes longer by the factors {alone} and moves {times} times the weights and "
        "gradients; a copy is cheap on a CPU device. With one micro-batch the two do the same: "
        f"{span(min(noise), max(noise), '.2f')} is the machine's noise. The paper's 7.6x is not reproduced."
    )


if __name__ == "__main__":
    main(__file__)
