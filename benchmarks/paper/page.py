"""Write docs/paper.md and its figures from the results.

python benchmarks/paper/page.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import devices
import fig8
import fig10
import fig12
import fig13
import fig17
import fig21
from runner import IMAGES, ROOT, kept, save_figure, section

EXPERIMENTS = (fig8, fig10, fig12, devices, fig13, fig17, fig21)
_HEAD = """# The paper's experiments

<!-- written by benchmarks/paper/page.py from benchmarks/results/paper -->

What do the experiments of Harmony (VLDB'22) give with this engine? `make paper` runs all of them (20 minutes).
**Measured** means on the CPU device, with small models and one thread: bytes are counted, times are ratios within one run.
No GPU was used. Schedules are in [vldb22.md](vldb22.md). Statements about the paper come from its abstract and scripts.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="docs/paper.md and its figures from the results")
    parser.add_argument("--out", type=Path, help="a folder for the page and figures, in place of docs")
    out: Path | None = parser.parse_args().out
    images, page = (out, out / "paper.md") if out else (IMAGES, ROOT / "docs" / "paper.md")
    for experiment in EXPERIMENTS:
        save_figure(experiment, kept(experiment), images)
    page.write_text(_HEAD + "".join(map(section, EXPERIMENTS)), encoding="utf-8")


if __name__ == "__main__":
    main()
