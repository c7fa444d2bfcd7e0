"""Parts that benchmarks share: small models, processes of their own, turns, and where results go."""

from __future__ import annotations

import io
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.bench.results import environment
from harmony_ds.cli.app import run

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
END_OF_TABLE = "<!-- end of table -->"
GIB, MIB = 2**30, 2**20


class Stack(nn.Module):
    """Layers one after the other, and a loss."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def language_model(family: str, **sizes: Any) -> nn.Module:
    """Return a model of transformers with random weights, the same at every call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, use_cache=False, **sizes))
    return model.train()


def tokens(vocabulary: int, *shape: int, seed: int = 1) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches of random tokens, of this shape, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, vocabulary, shape, generator=generator)
        yield {"input_ids": ids, "labels": ids}


def quiet() -> None:
    """Leave out warnings and logs, and use one thread."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def interleaved(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each, round by round in turns, each after one untimed run."""
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def answers_of(module: str, *words: object, processes: int = 1) -> list[Any]:
    """Run a module in a process (or, under torchrun, in several) and return the JSON lines that it prints."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(several if processes > 1 else []), "-m", module, *map(str, words)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith(("{", "["))]


def status_bytes(row: str) -> int:
    """Return a row of this process's status: "VmRSS" (resident memory), "VmHWM" (the most of it), "RssAnon" (no files)."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[row].split()[0]) * 1024


def write_results(name: str, content: dict[str, Any]) -> None:
    """Write `results/NAME.json`, with the environment that it was measured in."""
    text = json.dumps({"environment": environment("cpu"), **content}, indent=1) + "\n"
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")


def put_table(page: Path, begin: str, table: Sequence[str]) -> None:
    """Replace the lines of a page between `begin`, which names the table's command, and the end of the table."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(END_OF_TABLE)
    page.write_text("\n".join([before + begin, *table, END_OF_TABLE + after]), encoding="utf-8")


def answer_of_command(words: Sequence[str]) -> dict[str, Any]:
    """Return what `harmony-ds WORDS`, which print JSON, print."""
    with redirect_stdout(io.StringIO()) as printed:
        run(list(words))
    answer: dict[str, Any] = json.loads(printed.getvalue())
    return answer
