"""Kept graphs on a device that counts every byte: plain PyTorch's bits, and a peak within the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

import harmony_ds
from harmony_ds.scheduler.choose import make_plan
from harmony_ds.scheduler.plan import TaskKind
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.stepping import planner
from tests.cover import spread
from tests.oracle import assert_same, train_plainly
from tests.simdevice.device import SimDevice
from tests.simdevice.test_engine_exactness import ALL, GROUP, SEED, STEPS, optimizer_for


@dataclass(frozen=True)
class Way:
    """One combination of settings; each family goes one of them."""

    dropout: float
    clip: float
    pack_layers: int
    stash: str
    graphs: tuple[int, ...]  # of how many micro-batches: of pack 0, 1, ..., and again from the front

    def __str__(self) -> str:
        return f"pack{self.pack_layers}-{self.stash}-drop{self.dropout}-graphs{''.join(map(str, self.graphs))}"


WAYS = (
    Way(0.1, 0.5, 1, "device", (GROUP,)),
    Way(0.1, 0.0, 1, "host", (GROUP, 0, 2)),
    Way(0.1, 0.5, 2, "host", (1, 3)),
    Way(0.1, 0.0, 2, "device", (0, 2, GROUP)),
)


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, ...]], None]:
    """From now on, every pack of a plan stays from forward to backward and keeps so many graphs."""

    def keep(counts: tuple[int, ...]) -> None:
        def found(*args: Any, **more: Any) -> tuple[Choice, ...]:
            choice, (_, costs, _, _, request) = search(*args, **more)[0], args
            packing, policy = choice.plan.packing, choice.plan.policy
            both = tuple(i for i in packing.forward if packing.packs[i].needs_backward)
            graphs = tuple(counts[i % len(counts)] for i in packing.backward)
            return (
                replace(choice, plan=make_plan(packing, costs, request, replace(policy, kept=both, graphs=graphs))),
            )

        monkeypatch.setattr(planner, "search", found)

    return keep


@pytest.mark.parametrize(("name", "way"), spread(list(ALL), WAYS), ids=str)
def test_same_weights_as_plain_accumulation_and_a_peak_within_the_plan(
    name: str, way: Way, keeping: Callable[[tuple[int, ...]], None]
) -> None:
    family = ALL[name]
    plain = family.build(way.dropout).train()
    if name in ("gpt2", "opt"):
        plain.config.use_cache = False  # a cache changes the bits of attention dropout, in plain PyTorch too
    groups: list[list[dict[str, Any]]] = [[family.batch(s * GROUP + i) for i in range(GROUP)] for s in range(STEPS)]
    train_plainly(
        plain,
        groups,
        optimizer_for(family, plain),
        clip=way.clip or None,
        seed_of=lambda step, index: harmony_ds.micro_batch_seed(SEED, step, index),
    )

    keeping(way.graphs)
    model = family.build(way.dropout).train()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GROUP,
        "gradient_clipping": way.clip,
        "harmony": {"seed": SEED, "stash": way.stash, "pack_layers": way.pack_layers},
    }
    engine, *_ = harmony_ds.initialize(
        model=model, optimizer=optimizer_for(family, model), config=config, device=SimDevice()
    )
    for group in groups:
        engine.train_batch(iter(group))
    engine.finish_updates()
    report, plan = engine.memory_report(), engine.plan
    engine.destroy()
    assert_same(model, plain, family.bitwise)
    kept = sum(task.kind is TaskKind.FORWARD_FOR_GRAPH for task in plan.tasks)
    assert kept == sum(task.kind is TaskKind.BACKWARD_FROM_GRAPH for task in plan.tasks)
    assert kept or len(plan.packing.forward) < 2
    assert report.device_peak_bytes <= report.planned_peak_bytes
    print(name, way, kept, report.device_peak_bytes / report.planned_peak_bytes)
