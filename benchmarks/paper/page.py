"""Writes docs/paper.md from the results: every figure, and what its numbers say.

python benchmarks/paper/page.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import fig8
import fig10
import fig12
import fig13
import fig17
import fig21
import table1
from common import IMAGES, RESULTS, ROOT, Content, Experiment

EXPERIMENTS = (
    table1.EXPERIMENT,
    fig8.EXPERIMENT,
    fig10.EXPERIMENT,
    fig12.EXPERIMENT,
    fig13.EXPERIMENT,
    fig17.EXPERIMENT,
    fig21.EXPERIMENT,
)
PAPER = {
    "table1": "The paper's table shows that its scheduler finds a schedule in little time. The original's scripts search for "
    "four models at D = 64 on four GTX 1080 Ti.",
    "fig8": "The original's scripts run BERT-Large with 600 samples a step on two and four GTX 1080 Ti, micro-batches and "
    "packs traded for each other under 11 GiB.",
    "fig10": "The paper compares its data-parallel and pipeline modes with baselines that virtualise memory, on four "
    'GTX 1080 Ti with BERT-96, GPT2-XL, VGG416 and ResNet1026; its abstract says "up to 7.6x". Its baselines are not '
    "published, and are not run here.",
    "fig12": "The paper breaks down what is swapped for GPT2-XL on four GTX 1080 Ti; its abstract says up to two orders of "
    "magnitude less than its baselines.",
    "fig13": "The paper fine-tunes BERT-Large on MRPC on one and four GTX 1080 Ti and overlays losses with plain training. "
    "Its models have no dropout; here it is on.",
    "fig17": "The original's scripts train GPT-2 of 10 to 40 billion parameters on up to eight GTX 1080 Ti and 750 GB of "
    "host memory.",
    "fig21": "The paper trains GPT2-Medium on WikiText-103 on one and four GTX 1080 Ti and compares with plain training.",
}
_HEAD = """# The paper's experiments

<!-- written by benchmarks/paper/page.py from benchmarks/results/paper -->

Harmony (VLDB'22), redone with this engine: `make paper` runs everything, `benchmarks/paper/README.md` says how.
**Measured** numbers were made on the CPU device of the machine named in each JSON (`benchmarks/results/paper`), with
small models and one thread; times there are ratios within one run. **Simulated** numbers are estimates under the cost
model of the original's scheduler ([vldb22.md](vldb22.md)) for its machine, GTX 1080 Ti on PCIe 3: no GPU was used, and
everything with more than one device is of this kind. The paper's figures themselves are not quoted: what is said of it
is from its abstract and its published scripts and schedules.
"""


def section(experiment: Experiment, content: Content) -> str:
    """One experiment's part of the page."""
    environment = content["environment"]
    image = f"images/paper/{experiment.name}.png"
    return (
        f"\n## {experiment.title}\n\n{PAPER[experiment.name]}\n\n![{experiment.title}]({image})\n\n"
        f"{experiment.says(content)}\n\n"
        f"`{environment['command']}`: {environment['seconds']:.0f} s, {environment['cpu']}, torch {environment['torch']}, "
        f"{environment['date']}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="docs/paper.md from the results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "paper.md")
    out: Path = parser.parse_args().out
    text = _HEAD
    for experiment in EXPERIMENTS:
        content = json.loads((RESULTS / f"{experiment.name}.json").read_text(encoding="utf-8"))
        assert (IMAGES / f"{experiment.name}.png").is_file(), f"{experiment.name} has no figure"
        text += section(experiment, content)
    out.write_text(text, encoding="utf-8")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
