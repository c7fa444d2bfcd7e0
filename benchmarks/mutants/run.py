"""Do the tests notice a fault? Plants one small fault at a time into a copy of the library and runs the tests there.

    python benchmarks/mutants/run.py                                  # all of mutants.json: many hours
    python benchmarks/mutants/run.py --only logits-of-all-micro-batches-alive
    python benchmarks/mutants/run.py --room model --deep              # what `make test-all` runs, of one room
    python benchmarks/mutants/run.py --clean                          # no mutant: the tests of the copy must pass
    python benchmarks/mutants/run.py --check                          # runs no test: is every fault still to be planted?

A mutant is killed by the first test that fails, or by a run that takes longer than 900 s. The tests of the mutant's own
room run first, then the engine's, then those that see most, then all others. Writes benchmarks/results/mutants.json
after every mutant.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).with_name("mutants.json")
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
_LIMIT_S = 900
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", re.MULTILINE)

# Both test devices take torch's one place for an accelerator: each has a run of its own.
_APART = [["tests/exactness"], ["tests/simdevice"]]
_FIRST = {
    room: [[f"tests/{room}"], ["tests/engine", "tests/profiling"], *_APART]
    for room in ("model", "runtime", "step", "scheduler", "offload", "optim", "distributed")
}
PATHS = {
    room: [*runs, ["tests", *(f"--ignore={path}" for paths in runs for path in paths)]] for room, runs in _FIRST.items()
}


@dataclass(frozen=True)
class Mutant:
    """One fault: `old`, which `file` holds once, is replaced by `new`. `breaks` says what goes wrong then."""

    name: str
    file: str
    old: str
    new: str
    breaks: str

    @property
    def room(self) -> str:
        return self.file.split("/")[1]


@dataclass(frozen=True)
class Trial:
    """Outcome of a mutant: "killed", "survived" or "error", by which test (or what else), after how long."""

    name: str
    file: str
    room: str
    breaks: str
    outcome: str
    by: str
    seconds: float


def read_mutants() -> list[Mutant]:
    """Read mutants.json; exit with the names of those that cannot be planted, and why."""
    mutants = [Mutant(**fields) for fields in json.loads(MUTANTS.read_text())]
    wrong = [why for mutant in mutants for why in why_not_planted(mutant)]
    for name, count in Counter(mutant.name for mutant in mutants).items():
        if count > 1:
            wrong.append(f"{name}: {count} mutants have this name")
    if wrong:
        raise SystemExit("not to be planted:\n" + "\n".join(wrong))
    return mutants


def why_not_planted(mutant: Mutant) -> Iterator[str]:
    """Yield what keeps `mutant` from being planted into the code as it is: nothing, if it can be planted."""
    file = ROOT / mutant.file
    if not file.is_file():
        yield f"{mutant.name}: there is no file {mutant.file}"
        return
    source = file.read_text()
    if source.count(mutant.old) != 1:
        yield f"{mutant.name}: its old text occurs {source.count(mutant.old)} times in {mutant.file}, not once"
    if mutant.old == mutant.new:
        yield f"{mutant.name}: its new text is the old one"
    if mutant.room not in PATHS:
        yield f"{mutant.name}: PATHS names no tests for the room {mutant.room}"
    compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")


def copy_tree(target: Path) -> None:
    """Copy the working tree as git sees it, with files that are not yet committed."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, paths: list[str], deep: bool) -> tuple[str, str]:
    """Run pytest in `tree`; return the outcome, and the first test that failed or the end of the output."""
    marks = "not gpu" if deep else "not deep and not gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "worksteal", "-m", marks]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}  # of processes that tests start, too
    command += ["-p", "no:cacheprovider", *paths]
    with tempfile.TemporaryFile("w+") as output:  # a pipe would stay open as long as any process that a test has left
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "killed", f"hangs in {' '.join(paths)}"
        finally:
            with suppress(ProcessLookupError):  # the session's others are gone with it, mostly
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read()
    if process.returncode == 0:
        return "survived", ""
    failed = _FAILED.search(said)
    if failed and process.returncode in (1, 2):  # with pytest-xdist, -x ends in 2
        return "killed", failed[1]
    return "error", f"pytest exits with {process.returncode}: {said[-2000:]}"


def run_all(tree: Path, room: str, deep: bool) -> tuple[str, str]:
    """Return the outcome of a room's runs, up to the first that is not "survived"."""
    for paths in PATHS[room]:
        outcome, by = run_tests(tree, paths, deep)
        if outcome != "survived":
            return outcome, by
    return "survived", ""


def try_out(mutant: Mutant, tree: Path, deep: bool) -> Trial:
    """Plant `mutant` in `tree`, run the tests, and take it away."""
    file, begin = tree / mutant.file, perf_counter()
    source = file.read_text()
    file.write_text(source.replace(mutant.old, mutant.new))
    try:
        outcome, by = run_all(tree, mutant.room, deep)
    finally:
        file.write_text(source)
    return Trial(mutant.name, mutant.file, mutant.room, mutant.breaks, outcome, by, round(perf_counter() - begin, 1))


def report(trials: list[Trial]) -> Iterator[str]:
    """Yield a table by room, and the mutants that survived or could not be tried."""
    count = Counter((trial.room, trial.outcome) for trial in trials)
    yield f"{'room':<12}{'killed':>8}{'survived':>10}{'error':>7}"
    for room in dict.fromkeys(trial.room for trial in trials):
        yield f"{room:<12}{count[room, 'killed']:>8}{count[room, 'survived']:>10}{count[room, 'error']:>7}"
    for trial in trials:
        if trial.outcome != "killed":
            yield f"{trial.outcome}: {trial.name} ({trial.file}): {trial.breaks} {trial.by}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument("--room", choices=PATHS, help="the mutants of this room alone")
    parser.add_argument("--deep", action="store_true", help="with the tests that `make test` leaves out")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="only check that every mutant can be planted")
    parser.add_argument("--clean", action="store_true", help="run the tests without a mutant")
    given = parser.parse_args()
    mutants = read_mutants()
    if unknown := set(given.only or ()).difference(mutant.name for mutant in mutants):
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    chosen = [m for m in mutants if (not given.only or m.name in given.only) and given.room in (None, m.room)]
    if given.check:
        print(f"{len(mutants)} mutants in {len({mutant.file for mutant in mutants})} files, each to be planted")
        return
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        if given.clean:
            outcome, by = run_all(tree, given.room or "model", given.deep)
            raise SystemExit(by if outcome != "survived" else 0)
        for mutant in chosen:
            trials.append(try_out(mutant, tree, given.deep))
            print(f"{trials[-1].outcome:<9}{mutant.name}: {trials[-1].by} ({trials[-1].seconds:.0f} s)", flush=True)
            given.out.write_text(json.dumps([asdict(trial) for trial in trials], indent=1) + "\n")
    print("\n".join(report(trials)), flush=True)


if __name__ == "__main__":
    main()
