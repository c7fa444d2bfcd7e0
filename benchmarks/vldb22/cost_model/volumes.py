"""Bytes that one optimizer step moves, over all devices."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from benchmarks.vldb22.cost_model.profile import PackCosts
from benchmarks.vldb22.cost_model.schedule import Schedule, Setup, Way, pinned, tasks_of, way


def volumes_of(setup: Setup, schedule: Schedule, costs: PackCosts) -> Counter[str]:
    """Return the bytes of each kind, by the original's names; `_in` is host to device, `_out` device to host.

    W_in: weights and buffers, for forward and backward tasks. data_in: what the data loader gives. stash: inputs of
    backward packs. Y, dY and dX: what forward and backward tasks hand on over the host. dW_out: gradients and buffers.
    p2p: outputs and gradients, from device to device. allreduce: what enters all-reduces. swap_total: all but those two.
    """
    tasks, replicas = tasks_of(setup, schedule), setup.replicas
    state = sum(costs.state_bytes(task.first, task.last) for task in tasks)
    state -= sum(costs.state_bytes(*layers) for layers in pinned(tasks))
    stash = sum(costs.input_bytes(task.first, setup.batch) for task in tasks if task.is_stashed)
    whole = costs.state_bytes(0, costs.count)
    found = Counter(W_in=replicas * state, dW_out=whole, data_in=costs.input_bytes(0, setup.batch))
    found.update(stash_in=stash, stash_out=stash)
    for source, target in pairwise(tasks):
        nbytes = costs.input_bytes(source.handed_layer(), setup.batch)
        if way(source, target) is Way.PEER:
            found["p2p"] += nbytes
        else:
            given, taken = ("dX_out", "dY_in") if source.backward else ("Y_out", "Y_in")
            found.update({given: nbytes, taken: nbytes})
    found["swap_total"] = found.total() - found["p2p"]
    found["allreduce"] = replicas * whole if replicas > 1 else 0
    return found
