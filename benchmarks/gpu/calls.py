"""Run one of the GPU suite's three calls: at most ten minutes, the most important step first, and resume the last call.

    bash gpu-kit/run.sh 1        is it right
    bash gpu-kit/run.sh 2        is it fast
    bash gpu-kit/run.sh 3        why

Installs the kit's wheels that the machine lacks into a folder of the kit, then runs every step of the call as a process of
its own with its own time limit. Writes under $OUT, after every step: `callN.json` (what ran, for how long, how it ended),
`callN.txt` (the summary that is printed in the end) and `callN.tar.gz` (all results and logs), and once
`extensions.tar.xz`, what has been compiled. A step that has succeeded is not run again: the archives of an earlier try are
looked for in $OUT and in the kit's folder `before/`.

Without a GPU the same steps run on the CPU device, small. Until the wheels are there it needs the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BUDGET_S = 555  # of 600: the rest is for the start and the last archive
_SUMMARY_CHARACTERS = 10_000
_STOP_S = 10
_COMPILE = "compile"
_EXTENSIONS = "extensions.tar.xz"


@dataclass(frozen=True, slots=True)
class Step:
    """One process.

    Attributes:
        script: below the sources, with its arguments; `{left}` is the seconds that it has.
        limit_s: it is killed then.
        least_s: it is not begun with less.
    """

    name: str
    script: str
    limit_s: float
    least_s: float = 20


def _race(name: str, options: str, limit_s: float, least_s: float = 90, sweep: bool = False) -> Step:
    """Return a comparison; with `sweep` the others run at their best micro-batch, which takes some minutes to find."""
    script = f"benchmarks/gpu/head_to_head.py {options} {'' if sweep else '--no-sweep '}--resume --limit-s {{left}}"
    return Step(name, script, limit_s, least_s)


def _one_step(model: str, options: str, limit_s: float) -> Step:
    name = f"step-{model}{options.replace(' --', '-').replace(' ', '-').replace('-{work}', '')}"
    return Step(name, f"benchmarks/gpu/one_step.py --model {model}{options}", limit_s, 0.6 * limit_s)


_CAP = "--cap-gib 24"
_ONE_ROW = f"{_CAP} --micro-batch 1 --rounds 1"
_TWO = "harmony,deepspeed-zero3-offload"
_PEERS = "benchmarks.gpu.engines"
_OTHERS = f"harmony,deepspeed-zero2-offload,{_PEERS}:roundpipe,{_PEERS}:deepspeed-super-offload,{_PEERS}:fsdp2-offload"
CALLS: dict[int, tuple[Step, ...]] = {
    1: (
        Step(_COMPILE, "benchmarks/gpu/compile_adam.py", 240),
        Step("correctness", "benchmarks/gpu/correctness.py", 420),
        Step("bases", "benchmarks/gpu/correctness.py --part bases", 180, 60),
        Step("device-memory", "benchmarks/gpu/device_memory.py", 120, 60),
        Step("demo", "examples/pretrain_gpt2/train.py --text {kit}/text/wikipedia.xml.bz2 --out {work}/demo", 120, 60),
    ),
    2: (
        Step(_COMPILE, "benchmarks/gpu/compile_adam.py", 240),
        _race("3b", f"--model llama-3b {_ONE_ROW} --clip --steps 1 --engines {_TWO} --uncapped torch-checkpoint", 300),
        _one_step("llama-3b", " --clip", 150),
        _race(
            "3b-best",
            f"--model llama-3b {_CAP} --rounds 1 --micro-batch 8 --clip --steps 2 --engines {_TWO} --uncapped=",
            450,
            300,
            sweep=True,
        ),
        _one_step("llama-8b", " --clip", 300),
        _race("6b", f"--model llama-6b {_ONE_ROW} --clip --steps 1 --engines {_TWO} --uncapped=", 480),
        _race(
            "3b-131072",
            f"--model llama-3b {_ONE_ROW} --clip --tokens 131072 --steps 1 --engines {_TWO} --uncapped torch-checkpoint",
            420,
        ),
        _one_step("llama-3b", "", 150),
        _one_step("llama-3b", " --clip --joins", 200),
        _race(
            "3b-rows-of-8192",
            f"--model llama-3b {_ONE_ROW} --clip --sequence 8192 --steps 1 --engines {_TWO} --uncapped torch-checkpoint",
            420,
        ),
        _race("others", f"--model llama-3b {_ONE_ROW} --clip --steps 1 --engines {_OTHERS} --uncapped=", 480),
        _race("3b-no-clip", f"--model llama-3b {_ONE_ROW} --no-clip --steps 1 --engines {_TWO} --uncapped torch", 360),
    ),
    3: (
        Step(_COMPILE, "benchmarks/gpu/compile_adam.py", 240),
        _one_step("llama-3b", " --clip --sequence 32768", 240),
        _one_step("llama-8b", " --clip --sequence 32768", 300),
        Step("qlora", "benchmarks/gpu/qlora.py", 300, 150),
        _one_step("llama-3b", " --clip --compile", 240),
        _race("ablations", "--model llama-3b --cap-gib 16 --micro-batch 1 --ablate --rounds 1", 300),
        _one_step("llama-3b", " --clip --cap-gib 8", 150),
        _one_step("llama-3b", " --clip --cap-gib 16", 150),
        _one_step("llama-3b", " --clip --sequence 131072 --tokens 131072", 300),
        _one_step("llama-3b", " --clip --float8 --compile", 240),
        _one_step("llama-8b", " --clip --state-16-bit", 300),
        _one_step("llama-3b", " --clip --disk {work}", 300),
    ),
}
"""The most valuable steps first: whatever is left when a call ends, the next one goes on with."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a step ended: "done", "failed", "out of time" or "not begun" (`outcome`), and which commit it ran."""

    outcome: str
    seconds: float = 0.0
    status: int | None = None
    commit: str = ""


def main() -> int:
    """Return the exit status: 0 if every step has succeeded, in this try or an earlier one."""
    options = _options()
    began = time.monotonic()
    kit: Path = options.kit.resolve()
    work = kit / "work" / f"call{options.call}"  # two calls may compare the same model: each goes on with its own
    out = Path(os.environ.get("OUT") or kit / "results")
    out.mkdir(parents=True, exist_ok=True)
    print(f"harmony_ds {_commit(kit)}", flush=True)
    call = _Call(options.call, kit, work, out, began + options.budget_s)
    call.go_on()
    call.run()
    return 0 if all(ended.outcome == "done" for ended in call.ended.values()) else 1


class _Call:
    def __init__(self, number: int, kit: Path, work: Path, out: Path, deadline: float) -> None:
        self.ended: dict[str, Ended] = {}
        self._number, self._kit, self._work, self._out, self._deadline = number, kit, work, out, deadline
        self._steps = CALLS[number]

    def go_on(self) -> None:
        """Take over the results of an earlier try."""
        self._logs.mkdir(parents=True, exist_ok=True)
        for folder in (self._kit / "before", self._out):
            for archive, into in ((f"call{self._number}.tar.gz", self._work), (_EXTENSIONS, self._kit)):
                if (folder / archive).is_file():
                    with tarfile.open(folder / archive) as earlier:
                        earlier.extractall(into, filter="data")
        if self._state.is_file():
            known = json.loads(self._state.read_text())["steps"]
            self.ended = {name: Ended(**ended) for name, ended in known.items()}

    def run(self) -> None:
        environment = self._environment()
        for step in self._steps:
            if self.ended.get(step.name, Ended("")).outcome == "done" and step.name != _COMPILE:
                continue  # what another machine has compiled may be missing here
            left = self._deadline - time.monotonic()
            if left < step.least_s:
                self.ended.setdefault(step.name, Ended("not begun"))
                continue
            print(f"{step.name}: at most {min(step.limit_s, left):.0f} s", flush=True)
            self.ended[step.name] = self._run(step, min(step.limit_s, left), environment)
            self._save()
            if step.name == _COMPILE:
                self._save_extensions()
        self._save()
        print((self._out / f"call{self._number}.txt").read_text())

    def _run(self, step: Step, limit_s: float, environment: dict[str, str]) -> Ended:
        begin = time.monotonic()
        values = {"left": f"{max(limit_s - 2 * _STOP_S, 1):.0f}", "kit": self._kit, "work": self._results}
        script, *arguments = [part.format(**values) for part in step.script.split()]
        source = self._kit / "source"
        with (self._logs / f"{step.name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, str(source / script), *arguments],
                cwd=source,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            # Whatever it has started ends with it: the next step needs the device for itself.
            _end_group(process)
        outcome = "out of time" if status is None else "failed" if status else "done"
        return Ended(outcome, round(time.monotonic() - begin, 1), status, _commit(self._kit))

    def _environment(self) -> dict[str, str]:
        site = self._kit / "site"
        _install_missing(self._kit / "wheels", site)
        for file in (*site.rglob("*"), *self._extensions.rglob("*.o")):
            os.utime(file, (0, 0))  # older than what ninja knows of an earlier try: not compiled again
        paths = [str(self._kit / "source"), str(site), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PATH": os.pathsep.join([str(site / "bin"), os.environ.get("PATH", os.defpath)]),
            "HOME": os.environ.get("HOME") or str(self._kit),
            "OUT": str(self._results),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCH_EXTENSIONS_DIR": str(self._extensions),
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            "THP_MEM_ALLOC_ENABLE": "1",  # pages of 2 MiB for host memory, for every engine
        }

    def _save_extensions(self) -> None:
        if not (self._out / _EXTENSIONS).is_file() and self._extensions.is_dir():
            with tarfile.open(self._out / _EXTENSIONS, "w:xz", preset=1) as archive:
                archive.add(self._extensions, self._extensions.name)

    @property
    def _extensions(self) -> Path:
        return self._kit / "extensions"

    @property
    def _logs(self) -> Path:
        return self._work / "logs"

    @property
    def _results(self) -> Path:
        return self._work / "results"

    @property
    def _state(self) -> Path:
        return self._work / f"call{self._number}.json"

    def _save(self) -> None:
        self._state.write_text(json.dumps({"steps": {n: asdict(e) for n, e in self.ended.items()}}, indent=1) + "\n")
        (self._out / self._state.name).write_text(self._state.read_text())
        (self._out / f"call{self._number}.txt").write_text(self._summary())
        with tarfile.open(self._out / f"call{self._number}.tar.gz", "w:gz") as archive:
            for part in (self._state, self._logs, self._results):
                if part.exists():
                    archive.add(part, part.name)

    def _summary(self) -> str:
        """Describe how every step ended, with the end of what each printed; room is shared evenly."""
        commit = _commit(self._kit)
        lines = [f"harmony_ds {commit}"]
        for name, ended in self.ended.items():
            line = f"{name:<36} {ended.outcome:<12} {ended.seconds:7.1f} s"
            line += f"  status {ended.status}" if ended.status else ""
            line += f"  (of {ended.commit})" if ended.commit not in ("", commit) else ""
            lines.append(line)
        head = "\n".join(lines)
        room = (_SUMMARY_CHARACTERS - len(head)) // max(len(self.ended), 1) - 40
        for name in self.ended:
            log = self._logs / f"{name}.log"
            if log.is_file():
                head += f"\n\n== {name}\n{log.read_text(errors='replace').strip()[-room:]}"
        return head[:_SUMMARY_CHARACTERS] + "\n"


def _commit(kit: Path) -> str:
    """Return which commit the kit's sources are of."""
    return (kit / "source" / "COMMIT").read_text().strip()


def _install_missing(wheels: Path, site: Path) -> None:
    """Install wheels that the machine lacks, if pip can: a step that needs another says so itself."""
    files = [file for file in sorted(wheels.glob("*.whl")) if _is_missing(file.name.split("-")[0])]
    if not files or (site / "deepspeed").is_dir():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(site), *map(str, files)], check=False)


def _is_missing(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return True
    return distribution == "deepspeed"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            continue


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", type=int, choices=CALLS)
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
