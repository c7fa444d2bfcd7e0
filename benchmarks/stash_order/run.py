"""How much time is saved if a pack's first stash comes back before the next pack's weights? Llama-3B, simulated.

    python -m benchmarks.stash_order.run       # a minute; nothing is allocated

The plan is the search's, with the stash on the host and no pack on the device from pass to pass. It is simulated as it is,
and with the first two stashes of every pack after the swap-in of the next pack's weights, on the same stream.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from benchmarks.common import GIB, ROOT
from harmony_ds.config.load import load_config
from harmony_ds.estimate.subject import load_subject
from harmony_ds.estimate.survey import estimate
from harmony_ds.profiling.hardware import hardware_of
from harmony_ds.scheduler.plan import Task, TaskKind
from harmony_ds.scheduler.search import search
from harmony_ds.scheduler.simulate import simulate

MODEL, TOKENS = ROOT / "benchmarks" / "models" / "llama-3b.json", 2048
MACHINES = ("rtx4090", "rtx4090/pcie3/desktop-ddr4")
BUDGETS_GIB = (24,)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def main() -> None:
    print("machine, GiB: packs, step with the weights first, step as planned")
    for machine in MACHINES:
        for gib in BUDGETS_GIB:
            print(line(machine, gib), flush=True)


def line(machine: str, gib: int) -> str:
    harmony = {"stash": "host", "residency": "off", "device_memory_gib": gib}
    config = load_config({**CONFIG, "harmony": harmony})
    survey = estimate(load_subject(str(MODEL), "meta", 1, TOKENS), config, hardware_of(machine))
    request = replace(survey.request, budget_bytes=gib * GIB)
    rates = survey.profile.machine
    plan = search(survey.graph, survey.costs, rates, survey.element, request)[0].plan
    late = replace(plan, tasks=weights_first(plan.tasks))
    now, before = (simulate(one, survey.costs, rates).step_ms / 1000 for one in (plan, late))
    packs = len(plan.packing.backward)
    return f"{machine}, {gib} GiB: {packs} packs, {before:.2f} s, {now:.2f} s ({100 * (1 - now / before):.1f} % less)"


def weights_first(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """Return the tasks with the first two stashes of every pack directly before its first run of the backward pass."""
    late: list[Task] = []
    waiting: list[Task] = []
    moved: Counter[int] = Counter()  # by pack
    for task in tasks:
        if task.kind is TaskKind.STASH_IN and moved[task.pack] < 2:
            moved[task.pack] += 1
            waiting.append(task)
            continue
        if task.kind is TaskKind.BACKWARD and waiting and waiting[0].pack == task.pack:
            late += waiting
            waiting = []
        late.append(task)
    return tuple(late)


if __name__ == "__main__":
    main()
