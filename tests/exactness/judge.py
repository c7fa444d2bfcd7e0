"""Runs cases and finds their outcomes: "equal", "refused: ErrorName", or "WRONG: ...".

Every case runs, in all of its settings, in a process of its own, forked from one that has imported everything and
computed nothing: a case that hangs, or leaves something running, disturbs no other. `python -m tests.exactness.judge` reads
names of cases, a line each, followed by the numbers of its settings, and answers with a line of JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyError
from harmony_ds.config import load_config
from tests import patches
from tests.exactness.case import CASES, Case, Found, Tolerance
from tests.exactness.sides import EngineSide, PlainEngine, PlainSide, Setting, Side, lazy
from tests.oracle import assert_same, difference_between

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300  # a second on a machine that does nothing else: only what hangs takes so long


@dataclass(frozen=True)
class Outcome:
    """The result of a case: the table's words, and what was seen in detail."""

    says: str
    detail: str = ""


def load_cases() -> dict[str, Case]:
    """Every case, by name, in the order of the table."""
    for file in sorted(Path(__file__).parent.glob("cases_*.py")):
        importlib.import_module(f"tests.exactness.{file.stem}")
    return CASES


# ---- in the case's process


def outcome_of(case: Case, setting: Setting) -> Outcome:
    """Runs both sides, here."""
    plain = PlainSide(setting)
    try:
        expected = ran(case, plain)
    except Exception:  # noqa: BLE001 - then it is no case
        return Outcome("WRONG: the case fails in plain PyTorch", traceback.format_exc())
    plain.finish()
    engine = EngineSide(setting)
    try:
        actual = ran(case, engine)
    except HarmonyError as error:
        return refused(error, engine, plain, case.tolerance)
    except Exception as error:  # noqa: BLE001 - whatever else it is, the table says so
        return Outcome(f"WRONG: {type(error).__name__}", traceback.format_exc())
    return compared(actual, expected, case.tolerance, engine.swap_ratio())


def refused(error: HarmonyError, engine: EngineSide, plain: PlainSide, tolerance: Tolerance | None) -> Outcome:
    name = type(error).__name__
    try:
        changed = changed_weights(engine, plain, tolerance)
    except HarmonyError as unreadable:
        return Outcome(f"WRONG: {name}, and then weights cannot be read", f"{error}\n{unreadable}")
    if changed:
        return Outcome(f"WRONG: {name} after weights had changed", f"{changed}\n{error}")
    return Outcome(f"refused: {name}", str(error))


def ran(case: Case, side: Side) -> dict[str, Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    found = flat(case.program(side))
    assert found, f"{case.name} looks at nothing"
    return found


def flat(found: Found) -> dict[str, Tensor]:
    """Return the results of a program, as copies of plain tensors."""
    return {name: torch.as_tensor(value).detach().to_dense().clone() for name, value in found.items()}


def compared(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: Tolerance | None, swap_ratio: float
) -> Outcome:
    try:
        assert_same(actual, expected, tolerance is None, 0.0 if tolerance is None else tolerance.relative)
    except AssertionError as error:
        return Outcome("WRONG: differs", str(error))
    how = "equal" if tolerance is None else f"equal to {tolerance.relative:g}: {tolerance.because}"
    return Outcome(how + (", not grouped" if swap_ratio > 1.0 else ""), f"{swap_ratio:.2f} times the least swaps")


def changed_weights(engine: EngineSide, plain: PlainSide, tolerance: Tolerance | None) -> str:
    """Which weights are not as some number of completed steps left them (and the program, after that); "" if none."""
    for model, reference in zip(engine.models, plain.engines, strict=False):
        changed = min((changed_since(model, reference, step, tolerance) for step in reference.history), key=len)
        if changed:
            return f"changed: {changed}"
    return ""


def changed_since(model: nn.Module, reference: PlainEngine, step: int, tolerance: Tolerance | None) -> list[str]:
    now = {name: p.detach() for name, p in model.named_parameters() if not lazy(p)}
    known = reference.history[step]
    relative = 0.0 if tolerance is None else tolerance.relative
    return [name for name, p in now.items() if not any(same(p, w.get(name), relative) for w in known)]


def same(actual: Tensor, expected: Tensor | None, relative: float) -> bool:
    if expected is None or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    return difference_between(actual, expected)[1] <= relative


# ---- the process that forks


def serve() -> None:
    cases = load_cases()
    patches.check_every_step()
    patches.leave_collections()
    patches.fix_rates()
    import_what_is_imported_late()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a child that looked through what is imported would copy all of its pages
    answers = os.dup(1)
    os.dup2(2, 1)  # what programs print is not an answer
    for line in sys.stdin:
        name, *numbers = line.split()
        outcomes = outcomes_of(cases[name], [cases[name].settings[int(number)] for number in numbers])
        os.write(answers, (json.dumps([asdict(outcome) for outcome in outcomes]) + "\n").encode())


def import_what_is_imported_late() -> None:
    """So that it is imported once, and not by every case."""
    importlib.import_module("harmony_ds.engine")
    importlib.import_module("peft")  # and transformers
    load_config({"train_micro_batch_size_per_gpu": 1})  # DeepSpeed, and the types of its keys
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch._dynamo


def outcomes_of(case: Case, settings: Sequence[Setting]) -> list[Outcome]:
    """One for each setting: all in one process, and each in its own where that one has not come to its end."""
    found = in_fork(case, settings)
    if isinstance(found, list) or len(settings) == 1:
        return found if isinstance(found, list) else [found]
    return [one[0] if isinstance(one, list) else one for one in (in_fork(case, (s,)) for s in settings)]


def in_fork(case: Case, settings: Sequence[Setting]) -> list[Outcome] | Outcome:
    """The outcomes in `settings`, or how the process ended without any."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        child_main(case, settings, writing)
    os.close(writing)
    limit_s = TIMEOUT_S * len(settings)
    ready, _, _ = select.select([reading], [], [], limit_s)
    if not ready:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if not ready:
        return Outcome("WRONG: hangs", f"no answer after {limit_s} s")
    if not said:
        return Outcome("WRONG: crashes", f"the process ended with {status}")
    found: list[Outcome] = pickle.loads(said)
    return found


def child_main(case: Case, settings: Sequence[Setting], answers: int) -> None:
    warnings.simplefilter("ignore")
    try:
        outcomes = [outcome_of(case, setting) for setting in settings]
    except BaseException:  # noqa: BLE001 - the process must answer
        outcomes = [Outcome("WRONG: the harness fails", traceback.format_exc())] * len(settings)
    with os.fdopen(answers, "wb") as pipe:
        pickle.dump(outcomes, pipe)
    os._exit(0)


# ---- for whoever asks


class Judge:
    """Asks a serving process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def outcomes(self, case: Case, numbers: Sequence[int] | None = None) -> list[Outcome]:
        """One for each of the case's settings with these `numbers` (None: for all of them)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        chosen = range(len(case.settings)) if numbers is None else numbers
        self._process.stdin.write(" ".join([case.name, *map(str, chosen)]) + "\n")
        self._process.stdin.flush()
        answers: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        return [Outcome(**answer) for answer in answers]


@contextmanager
def judging() -> Iterator[Judge]:
    """A judge that has started."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.exactness.judge"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Judge(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    serve()
