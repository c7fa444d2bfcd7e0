"""One case: a model, a step and a budget. Train three steps of it without a GPU, and replay the third in the allocator."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import harmony_ds
from benchmarks.allocator.events import Event
from benchmarks.allocator.recorder import RecordedDevice, Recorder
from benchmarks.allocator.replay import STEPS, AllocatorReplay, Pools, replay
from benchmarks.common import GIB
from harmony_ds.config import load_config
from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.estimate.survey import update_cost
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.optim.updater import GradientNorm, NormOptions
from harmony_ds.profiling.hardware import Host, hardware_of
from harmony_ds.profiling.roofline import on_meta
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import Plan

MOST_TIMES_REPLANNED = 4
"""The engine leaves at most an eighth of the budget free (harmony_ds/step/beside_plans.py)."""
HOST = Host("16 cores", 128, 1, 7000, 16, "42 GB/s of updates")
"""The host of the H200 that harmony_ds was measured on."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a step and a budget.

    Attributes:
        model: path of a configuration of transformers.
        rows: of a micro-batch.
        accumulation: micro-batches of a step.
        sequence: tokens of a row.
        cap_gib: the budget of device memory.
        ragged: whether micro-batches but the first have 50 to 100 % of the tokens, drawn by chance.
        clip: clip gradients to this norm; 0: not at all.
        harmony: more settings of the ds_config's "harmony".
    """

    model: Path
    rows: int
    accumulation: int
    sequence: int
    cap_gib: float
    ragged: bool = False
    clip: float = 0.0
    harmony: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What distinguishes it, for people."""
        parts = [f"{self.accumulation} x {self.rows} rows of {self.sequence}", f"{self.cap_gib:g} GiB"]
        if self.ragged:
            parts.append("ragged")
        if self.clip:
            parts.append(f"clipping at {self.clip:g}")
        if self.harmony:
            parts.append(json.dumps(self.harmony))
        return f"{self.model.stem}, {', '.join(parts)}"

    def config(self) -> dict[str, Any]:
        """Return the ds_config."""
        return {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": True, "check_grad_overflow": False},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.1}},
            "harmony": {"device_memory_gib": self.cap_gib, **self.harmony},
        }

    def batches(self, vocabulary: int, chance: random.Random) -> Iterator[dict[str, Tensor]]:
        """Yield the micro-batches of a step; tokens are all the same."""
        for number in range(self.accumulation):
            tokens = self.sequence
            if self.ragged and number:
                tokens = chance.randint(self.sequence // 2, self.sequence)
            ids = torch.full((self.rows, tokens), vocabulary - 1)
            yield {"input_ids": ids, "labels": ids.clone()}


@dataclass(frozen=True, slots=True)
class Recording:
    """What an engine has allocated in three steps, and what it had planned.

    Attributes:
        events: in their order, since the engine was made.
        planned_peak_bytes: of the plan.
        set_aside_bytes: of the budget, for no plan.
        predicted_step_ms: of the plan.
        reason: why the plan was chosen.
        plan: what was run.
        costs: of a micro-batch.
        graph: the model's layers and parameters.
    """

    events: Sequence[Event]
    planned_peak_bytes: int
    set_aside_bytes: int
    predicted_step_ms: float
    reason: str
    plan: Plan
    costs: CostTable
    graph: LayerGraph


def record(case: Case, times_replanned: int = 0) -> Recording:
    """Train three steps on the meta device, and return what was allocated.

    Args:
        times_replanned: how often the engine has planned anew before, for a 32nd of the budget less each time.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    hardware = replace(hardware_of("h200"), host=HOST)
    shape = AutoConfig.from_pretrained(case.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).train()
    budget_bytes = int(case.cap_gib * GIB)
    recorder = Recorder(AllocatorReplay(budget_bytes, expandable=True, pools=Pools.ENGINE))
    config, chance = case.config(), random.Random(0)
    with _without_updates(), on_meta(hardware.kernels()) as clock, recorder:
        device = RecordedDevice(clock, budget_bytes, recorder)
        with recorder.aside():  # slabs and masters, in host memory
            engine, *_ = harmony_ds.initialize(model=model, config=config, device=device)
        engine._state.planner.profiler.machine = hardware.machine(update_cost(load_config(config)))
        engine._state.executor.on_progress(recorder.end_task)
        for _ in range(times_replanned):
            engine._state.planner.leave_more_free()
        for step in range(STEPS):
            recorder.begin_step(step)
            engine.train_batch(case.batches(shape.vocab_size, chance))
        recorder.begin_step(STEPS)
        report, plan = engine.plan_report(), engine.plan
        found = Recording(
            recorder.events,
            plan.peak_bytes,
            engine.memory_report().beside_bytes,
            report.predicted_step_ms,
            report.choices[0].reason,
            plan,
            engine._state.planner.costs[0],
            engine._state.planner.graph,
        )
        engine.destroy()
    return found


@contextmanager
def _without_updates() -> Iterator[None]:
    """Leave out what needs values: updates on the host, the value of a norm, and the fused optimizer's check of devices."""
    with_total = GradientNorm.from_total

    def from_total(total: Tensor, norm_options: NormOptions) -> GradientNorm:  # noqa: ARG001 - it has no value
        return with_total(torch.ones(()), norm_options)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    with (
        patch.object(HostOptimizer, "step", nothing),
        patch.object(GradientNorm, "from_total", staticmethod(from_total)),
        patch.object(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", nothing),
    ):
        yield


def answer(case: Case, recording: Recording, pools: Pools, expandable: bool) -> dict[str, Any]:
    """Return what the benchmark says of a case, as JSON."""
    budget_bytes = int(case.cap_gib * GIB)
    capped = replay(recording.events, budget_bytes, expandable, pools)
    free = replay(recording.events, None, expandable, pools)
    return {
        "case": case.name,
        "out_of_memory": bool(capped.failure),
        "failure": capped.failure,
        "retries_a_step": capped.retries,
        "host_waits_a_step": capped.host_waits,
        "given_back_bytes": capped.returned_bytes,
        "reserved_peak_bytes": capped.reserved_peak_bytes,
        "reserved_without_cap_bytes": free.reserved_peak_bytes,
        "allocated_peak_bytes": capped.allocated_peak_bytes,
        "planned_peak_bytes": recording.planned_peak_bytes,
        "set_aside_bytes": recording.set_aside_bytes,
        "budget_bytes": budget_bytes,
        "predicted_step_ms": recording.predicted_step_ms,
        "plan": recording.reason,
    }


def answer_with_replanning(case: Case, pools: Pools, expandable: bool) -> dict[str, Any]:
    """Return the case's answer, and how it goes on where the third step tries again.

    The engine then plans anew for a 32nd of the budget less, up to four times, until a step does not.
    """
    found = answer(case, record(case), pools, expandable)
    times, later = 0, found
    while later["retries_a_step"] and times < MOST_TIMES_REPLANNED:
        times += 1
        later = answer(case, record(case, times), pools, expandable)
    return {
        **found,
        "times_replanned": times,
        "retries_when_replanned": later["retries_a_step"],
        "predicted_step_ms_when_replanned": later["predicted_step_ms"],
    }
