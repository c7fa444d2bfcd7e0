"""The paper's server and its GPT2-10B as this package's own planner sees them: one to eight devices driven by one process.

What enters is the original's profile (`reference`); what leaves are this package's nouns, and the plans that its search
finds for them. Nothing here knows the original's schedules or its cost model.

python -m benchmarks.vldb22.ours [--devices 1 8] [--page docs/vldb22.md]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.vldb22.planner.machine import HARMONY_VLDB22
from benchmarks.vldb22.planner.profile import LayerProfile
from benchmarks.vldb22.reference import profile_of
from harmony_ds.config import HarmonySettings
from harmony_ds.decomposer.graph import LayerGraph, LayerSpec, ParameterSpec
from harmony_ds.profiler.costs import CallCost, CostTable
from harmony_ds.profiler.flow import Flow, Kind
from harmony_ds.profiler.profile import UPDATE_BYTES_PER_ELEMENT, Machine
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.packing import ElementBytes
from harmony_ds.scheduler.plan import Policy
from harmony_ds.scheduler.search import Choice, search

MODEL, SAMPLES = "gpt2_10b", 32
BUDGET_BYTES = 10 * 2**30
"""The original scheduler's default for a card of 11 GiB."""
SIZES = (1, 2)
"""Micro-batches to be tried: beyond two, the profile's time per sample grows."""
_TITLE = "## By this package's own planner"
_HEAD = f"""{_TITLE}

`python -m benchmarks.vldb22.ours --page docs/vldb22.md` writes this section. GPT2-10B, D = {SAMPLES}, 10 GiB a device;
what `"harmony": {{"devices": N}}` would run: times and bytes of the original's profile, and its rates (a link of 11.5 GiB/s
each way that all devices share, 8.2 GiB/s between two), but this package's plans and simulator. The host updates as fast as
one process of the original for each device, up to what four channels of DDR4-2400 give. Packs are the same in both passes,
each on one device; swaps are hidden under compute, which the original's cost model lets happen only in part. Speed-ups are
over the best plan for one device.

| N | micro-batch | plan | peak GiB | step s | speed-up | search s |
|---|---|---|---|---|---|---|
"""
_FLOAT = 4
_TASK_MS, _SWAP_MS = 0.1, 0.02
"""This package's own values for issuing a task and for the latency of a copy (`harmony_ds/profiler/hardware.json`)."""
_DEVICE_BYTES_PER_MS = 484e6 * 0.85
_HOST_BYTES_PER_MS = 4 * 2400e3 * 8 * 0.75
"""Four channels of DDR4-2400, as `benchmarks/paper/machine.py` takes them to be; the shares are the catalogue's."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """The best plan found for so many devices: its micro-batch, what it takes, and how long it was searched for."""

    devices: int
    micro_batch: int
    choice: Choice
    search_s: float

    @property
    def step_ms(self) -> float:
        return self.choice.prediction.step_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--page", type=Path, help="a page whose last section is to be this table")
    arguments = parser.parse_args()
    found = []
    for devices in arguments.devices:
        found.append(scaled(devices))
        print(_line(found[-1], found[0].step_ms), end="", flush=True)
    if arguments.page is not None:
        before = arguments.page.read_text(encoding="utf-8").partition(_TITLE)[0].rstrip("\n")
        arguments.page.write_text(f"{before}\n\n{section(found)}", encoding="utf-8")


def section(found: Sequence[Scaled]) -> str:
    """The table, over the first of `found`."""
    return _HEAD + "".join(_line(one, found[0].step_ms) for one in found)


def _line(one: Scaled, alone_ms: float) -> str:
    cells = (
        one.devices,
        one.micro_batch,
        one.choice.reason,
        f"{max(one.choice.plan.device_peaks) / 2**30:.1f}",
        f"{one.step_ms / 1000:.1f}",
        f"{alone_ms / one.step_ms:.2f}",
        f"{one.search_s:.0f}",
    )
    return f"| {' | '.join(map(str, cells))} |\n"


def scaled(devices: int, samples: int = SAMPLES) -> Scaled:
    """The best plan for so many devices, of all sizes of a micro-batch."""
    begin = time.process_time()
    found = [(size, planned(devices, size, samples)) for size in SIZES if samples % size == 0]
    size, choice = min(found, key=lambda one: one[1].prediction.step_ms)
    return Scaled(devices, size, choice, time.process_time() - begin)


@cache
def planned(devices: int, micro_batch: int, samples: int = SAMPLES) -> Choice:
    """The plan that this package's search finds for a step of so many samples."""
    profile = profile_of(MODEL)
    buffers = sum(layer.buffer_bytes for layer in profile.layers)
    request = PlanRequest(
        HarmonySettings(residency="auto" if devices == 1 else "kept"),
        samples // micro_batch,
        BUDGET_BYTES,
        resident_bytes=buffers,
        policy=Policy(deferred_update=False, gradient_slabs=3 * devices, pipeline=devices),
    )
    (best,) = search(
        graph_of(profile), table_of(profile, micro_batch), machine_of(profile, devices), ElementBytes(4, 4), request
    )
    return best


def graph_of(profile: LayerProfile) -> LayerGraph:
    """Its layers, each with one parameter; the last, which holds the loss and no weights, is none."""
    numels = [layer.weight_bytes // _FLOAT for layer in profile.layers[:-1]]
    parameters = tuple(ParameterSpec(f"p{i}", (n,), True, state_bytes=8 * n) for i, n in enumerate(numels))
    layers = tuple(LayerSpec(i, f"l{i}", (f"p{i}",)) for i in range(len(numels)))
    return LayerGraph(layers, parameters, tuple(range(len(numels))), ())


def table_of(profile: LayerProfile, micro_batch: int) -> CostTable:
    """Its costs, times as measured; of memory, a graph is counted as all that recomputing and propagating back takes."""
    forward_ms, forward_peaks = profile.forward.at(micro_batch)
    backward_ms, backward_peaks = profile.backward.at(micro_batch)
    inputs = [layer.input_bytes * micro_batch for layer in profile.layers]
    calls, last = [], len(profile.layers) - 1
    for place, layer in enumerate(profile.layers[:-1]):
        own = layer.weight_bytes + layer.buffer_bytes + inputs[place]
        running = max(0, backward_peaks[place] - own - layer.weight_bytes)
        calls.append(
            CallCost(
                alive_bytes=inputs[place],
                stash_bytes=inputs[place],
                shared_bytes=inputs[place] if place else 0,
                forward_bytes=max(inputs[place + 1], forward_peaks[place] - own),
                graph_bytes=running,
                kept_bytes=running,
                settle_bytes=inputs[place + 1],
                backward_bytes=running,
                gradient_bytes=layer.weight_bytes,
                needs_backward=True,
                forward_ms=forward_ms[place],
                backward_ms=backward_ms[place],
                fused_ms=backward_ms[place],
                propagate_ms=backward_ms[place] - forward_ms[place],
            )
        )
    handed = Flow(
        nbytes=tuple(inputs[1:]),
        returns=(True,) * last,
        events=tuple((Kind.CALL, p, (p - 1,) if p else (), (p,)) for p in range(last)),
    )
    return CostTable(
        tuple(range(last)), tuple(calls), backward_peaks[last], tail_ms=backward_ms[last], scalar_bytes=4, flow=handed
    )


def machine_of(profile: LayerProfile, devices: int) -> Machine:
    """The paper's server, by its scheduler's constants.

    All devices share the host's link, as in the original. Its one rate for both directions becomes the rate of host
    memory, on which the swaps of all devices draw; updates, which have a rate of their own there, draw on nothing. There
    each device has a process that updates at the rate of the profile; here the host updates as fast as so many of them,
    but no faster than its memory.
    """
    swap = HARMONY_VLDB22.swap
    elements = sum(layer.weight_bytes for layer in profile.layers) / _FLOAT
    alone = elements / sum(layer.update_ms for layer in profile.layers)
    updates = min(devices * alone, _HOST_BYTES_PER_MS / UPDATE_BYTES_PER_ELEMENT)
    return Machine(
        name="GTX 1080 Ti on PCIe 3, by the original's constants",
        copies_overlap=True,
        swap_in_bytes_per_ms=swap,
        swap_out_bytes_per_ms=swap,
        link_bytes_per_ms=2 * swap,
        update_elements_per_ms=updates,
        norm_elements_per_ms=updates,
        host_bytes_per_ms=2 * swap,
        device_update_elements_per_ms=_DEVICE_BYTES_PER_MS / UPDATE_BYTES_PER_ELEMENT,
        swap_ms=_SWAP_MS,
        task_ms=_TASK_MS,
        update_bytes_per_element=1e-9,
        peer_bytes_per_ms=HARMONY_VLDB22.peer,
    )


if __name__ == "__main__":
    main()
