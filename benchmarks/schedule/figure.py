"""Draw one step in ZeRO-3 offload's order and in Harmony's: `python -m benchmarks.schedule.figure`.

Both are plans of this engine, of the same model, packs and micro-batches on a machine that is only described; the times are
predicted. ZeRO-3 offload's order is the engine's plan with `"grouping": false`: every micro-batch runs forward and backward
through all packs before the next one begins. It writes docs/images/schedule.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.common import GIB, ROOT
from harmony_ds.config import load_config
from harmony_ds.estimate.subject import load_subject
from harmony_ds.estimate.survey import estimate
from harmony_ds.profiling.hardware import hardware_of
from harmony_ds.scheduler.plan import RUNS
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.spans import COMPUTE, SWAP_IN, SWAP_OUT, UPDATE, Span

FIGURE = ROOT / "docs" / "images" / "schedule.png"
MODEL = Path(__file__).parents[1] / "models" / "llama-6b.json"
MACHINE, TOKENS, MICRO_BATCHES = "rtx4090/pcie4/desktop-ddr5", 2048, 4
TRACKS = {SWAP_IN: "swap in", COMPUTE: "compute", SWAP_OUT: "swap out", UPDATE: "update on the host"}
TITLES = {
    False: "ZeRO-3 offload's order: each micro-batch goes through all packs",
    True: "Harmony's order: each pack takes all micro-batches",
}


def main() -> None:
    figure, rows = pyplot.subplots(2, 1, figsize=(11, 5.2), sharex=True, layout="constrained")
    subject = load_subject(MODEL, "meta", 1, TOKENS)
    for axes, (grouping, title) in zip(rows, TITLES.items(), strict=True):
        survey = estimate(subject, load_config(_ds_config(grouping)), hardware_of(MACHINE))
        choice = search(survey.graph, survey.costs, survey.profile.machine, survey.element, survey.request)[0]
        draw(axes, choice)
        step, gib = choice.prediction.step_ms / 1e3, choice.prediction.swaps.total / GIB
        axes.set_title(f"{title}: {gib:.0f} GiB over the link, {step:.1f} s", loc="left", fontsize=11)
        print(f"{title}: {gib:.1f} GiB, {step:.2f} s, {len(choice.plan.packs)} packs")
    rows[-1].set_xlabel(
        "seconds of a step, predicted; a colour is a pack of layers, and a box in compute a micro-batch"
    )
    figure.savefig(FIGURE, dpi=110)
    print(f"written: {FIGURE.relative_to(ROOT)}")


def draw(axes: Axes, choice: Choice) -> None:
    """Draw what each stream does, in the colour of its pack; compute is cut into the passes of micro-batches."""
    colours = pyplot.get_cmap("viridis")
    last = max(1, len(choice.plan.packs) - 1)
    for span in choice.prediction.spans:
        if span.stream not in TRACKS:
            continue
        height = list(TRACKS).index(span.stream)
        for begin, end in _parts(span):
            colour = colours(span.tasks[0].pack / last)
            axes.barh(-height, end - begin, left=begin, height=0.8, color=colour, edgecolor="white", linewidth=0.4)
    axes.set_yticks([-height for height in range(len(TRACKS))], list(TRACKS.values()))
    axes.spines[["top", "right"]].set_visible(False)


def _parts(span: Span) -> list[tuple[float, float]]:
    """Return from when to when each task of a span runs, in seconds: the simulator runs a pack's passes as one."""
    count = len(span.tasks) if span.tasks[0].kind in RUNS else 1
    length = (span.end_ms - span.begin_ms) / count
    return [((span.begin_ms + i * length) / 1e3, (span.begin_ms + (i + 1) * length) / 1e3) for i in range(count)]


def _ds_config(grouping: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "bf16": {"enabled": True},
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "harmony": {"grouping": grouping, "pack_layers": 5, "residency": "off", "device_memory_gib": 21.6},
    }


if __name__ == "__main__":
    main()
