"""Writes docs/paper.md from the results: every figure, and what its numbers say.

python benchmarks/paper/page.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import devices
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
    devices.EXPERIMENT,
    fig13.EXPERIMENT,
    fig17.EXPERIMENT,
    fig21.EXPERIMENT,
)
PAPER = {
    "table1": "The original's scripts for this table search a schedule for four models at 64 samples a step, for four GTX "
    "1080 Ti.",
    "fig8": "The original's scripts for this figure run BERT-Large with 600 samples a step on four GTX 1080 Ti, larger "
    "micro-batches with smaller packs against the reverse.",
    "fig10": "The original's scripts for this figure run BERT-96, GPT2-XL, VGG416 and ResNet1026 at three batch sizes on "
    'four GTX 1080 Ti. The abstract says "up to 7.6x" over baselines with virtualised memory, whose code is not public; '
    "what stands for them here is swapping for each micro-batch.",
    "fig12": "The original's scripts for this figure are those of Fig. 10 with GPT2-XL. The abstract says that swaps are "
    "reduced by up to two orders of magnitude.",
    "devices": "The original's scripts for these two figures run four GTX 1080 Ti as replicas and as a pipeline. Here "
    "streams of CPU devices keep virtual clocks: compute and copies take the time of a given profile, events order them, "
    "and everything else is the engine as it is.",
    "fig13": "The original's scripts fine-tune BERT-Large on MRPC on one and on four GTX 1080 Ti, without dropout; its "
    "slides say that training matches exactly. Here the pairs are made from Wikipedia (neighbours in an article, or not), "
    "and dropout is on.",
    "fig17": "The original's scripts for these figures train GPT-2 of 10 to 40 billion parameters, 32 samples a step, on "
    "one to eight GTX 1080 Ti with 750 GB of host memory.",
    "fig21": "The original's scripts train GPT2-Medium on WikiText-103 on one and on four GTX 1080 Ti. Here the text is an "
    "excerpt of Wikipedia, and the model small.",
}
_HEAD = """# The paper's experiments

<!-- written by benchmarks/paper/page.py from benchmarks/results/paper -->

Harmony (VLDB'22), redone with this engine: `make paper` runs everything, `benchmarks/paper/README.md` says how.
**Measured** numbers were made on the CPU device of the machine named in each JSON (`benchmarks/results/paper`), with
small models and one thread; times there are ratios within one run. **Simulated** numbers are estimates under the cost
model of the original's scheduler ([vldb22.md](vldb22.md)) for its machine, GTX 1080 Ti on PCIe 3: no GPU was used, and
everything with more than one device is of this kind, or was **executed in virtual time** (says its section). The paper's
figures themselves are not quoted: what is said of it is from its abstract and its published scripts and schedules.
"""


def section(experiment: Experiment, content: Content) -> str:
    """One experiment's part of the page."""
    environment = content["environment"]
    image = f"images/paper/{experiment.name}.png"
    return (
        f"\n## {experiment.title}\n\n{PAPER[experiment.name]}\n\n![{experiment.title}]({image})\n\n"
        f"{experiment.says(content)}\n\n"
        f"`{environment['command']}`: {environment['seconds']:.0f} s, {environment['cpu']}, "
        f"load {environment['load_average'][0]:.1f} on {environment['cores']} cores, torch {environment['torch']}, "
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
