"""One trainer twice: as it is on plain PyTorch, and with HarmonyMixin in packs of one layer."""

from __future__ import annotations

import copy
import io
import math
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harmony_ds.integrations.transformers import HarmonyMixin

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 4,
    "num_train_epochs": 2, "learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.01, "logging_steps": 1,
    "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "seed": 3,
}  # fmt: skip
DS_CONFIG: dict[str, Any] = {"harmony": {"device": "cpu", "pack_layers": 1, "progress": False}}
_EXACT = ("loss", "grad_norm", "learning_rate", "eval_loss")
_OF_TIME = ("runtime", "per_second", "flos", "step_time", "mem_")


@dataclass(frozen=True, slots=True)
class Case:
    """A trainer, the settings that are tried, and the further arguments it is made with, new for each of the two."""

    kind: str
    name: str
    trainer: type
    settings_type: type
    settings: Mapping[str, Any]
    make: Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a case; `off` is the largest difference of a weight over the largest weight of its tensor.

    `ratio` is the bytes of weights and gradients that the last step swapped, over the least possible. `differs` names what
    is not equal to the bit, and is empty if everything is. `error`: of the stock trainer (`stock: ...`) or of ours.
    """

    kind: str
    name: str
    settings: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    off: float = 0.0
    ratio: float = 0.0
    differs: str = ""
    error: str = ""
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not self.error and not self.differs


def compare(case: Case) -> Row:
    """Train both; return how they differ."""
    begin = time.perf_counter()
    named = {"kind": case.kind, "name": case.name, "settings": {key: str(one) for key, one in case.settings.items()}}
    ours_type = type("Ours", (HarmonyMixin, case.trainer), {})
    try:
        stock = trained(case, case.trainer, {})
    except Exception as error:  # noqa: BLE001 - it is the row
        return Row(**named, error=f"stock: {said(error)}")
    try:
        ours = trained(case, ours_type, {"ds_config": DS_CONFIG})
    except Exception as error:  # noqa: BLE001 - it is the row
        return Row(**named, error=said(error))
    engine = ours.harmony_engine
    off = largest_difference(stock.model, ours.model)
    differs = f"weights, by {off:.1e}" if off else difference_of_logs(stock.state.log_history, ours.state.log_history)
    row = Row(
        **named, steps=engine.global_steps, off=off, ratio=engine.swap_report().ratio, differs=differs,
        seconds=time.perf_counter() - begin,
    )  # fmt: skip
    engine.destroy()
    return row


def trained(case: Case, kind: type, more: dict[str, Any]) -> Any:
    """Return a trainer of this class after its training."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        given = copy.deepcopy(dict(case.settings))  # the Trainer writes into some
        settings = case.settings_type(**{"output_dir": folder, **SETTINGS, **given})
        trainer = kind(args=settings, **case.make(), **more)
        torch.manual_seed(5)  # completions are sampled
        random.seed(5)
        np.random.seed(5)
        trainer.train()
        return trainer


def said(error: Exception) -> str:
    """Return an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def largest_difference(expected: torch.nn.Module, actual: torch.nn.Module) -> float:
    """Return the largest difference of any weight, over its tensor's largest value; exactly 0.0 for equal bits."""
    others = dict(actual.named_parameters())
    off = 0.0
    for name, one in expected.named_parameters():
        if not torch.equal(one, others[name]):
            difference = (one - others[name]).detach().abs().max() / one.detach().abs().max().clamp(min=1e-12)
            off = max(off, difference.item(), 1e-45)
    return off


def difference_of_logs(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> str:
    """Name the first entry that differs: losses, norms and rates to the bit; metrics, means in another order, to 1e-5."""
    if len(expected) != len(actual):
        return f"{len(expected)} entries in the log, and ours has {len(actual)}"
    for ours, theirs in zip(actual, expected, strict=True):
        for key, value in theirs.items():
            if any(part in key for part in _OF_TIME):
                continue
            tolerance = 0.0 if key in _EXACT else 1e-5
            if key not in ours or not is_same(value, ours[key], tolerance):
                return f"{key} of step {theirs.get('step')}: {value}, and ours {ours.get(key)}"
    return ""


def is_same(value: Any, other: Any, tolerance: float) -> bool:
    """Return whether two logged values are equal, floats to a relative tolerance; nan is equal to nan."""
    if isinstance(value, float) and isinstance(other, float):
        both_nan = math.isnan(value) and math.isnan(other)
        return both_nan or math.isclose(value, other, rel_tol=tolerance, abs_tol=tolerance / 100)
    return bool(value == other)
