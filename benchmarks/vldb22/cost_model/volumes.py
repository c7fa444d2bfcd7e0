"""Bytes that one optimizer step moves, over all devices: counted from the task graph."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.vldb22.cost_model.graph import Content, DeviceTask, DeviceTaskKind, Medium, Port, TaskGraph
from benchmarks.vldb22.cost_model.profile import PackCosts


@dataclass(frozen=True, slots=True)
class Volumes:
    """Bytes of each kind; `_in` is host to device, `_out` device to host.

    Attributes:
        weights_in: weights and buffers, for forward and backward tasks.
        data_in: what the data loader gives.
        stash_in, stash_out: inputs of backward packs.
        input_in, input_out: what forward tasks hand on over the host.
        gradient_in, gradient_out: what backward tasks hand on over the host.
        weight_gradients_out: gradients and buffers.
        peer: inputs and gradients, from device to device.
        all_reduced: gradients and buffers that enter all-reduces, over all devices.
    """

    weights_in: int
    data_in: int
    stash_in: int
    stash_out: int
    input_in: int
    input_out: int
    gradient_in: int
    gradient_out: int
    weight_gradients_out: int
    peer: int
    all_reduced: int

    @property
    def swapped(self) -> int:
        """Everything between the host and devices."""
        return (
            (self.weights_in + self.data_in + self.weight_gradients_out)
            + (self.stash_in + self.stash_out)
            + (self.input_in + self.input_out)
            + (self.gradient_in + self.gradient_out)
        )


_HOST = (Medium.SWAP, Medium.MESSAGE, Medium.SHARED)


def count_volumes(graph: TaskGraph, costs: PackCosts) -> Volumes:
    """Add up what the tasks take and give."""
    tasks = [task for task in graph.tasks if task.kind is not DeviceTaskKind.UPDATE]
    taken = [(port, _bytes(port, task, costs)) for task in tasks for port in task.takes]
    given = [(port, _bytes(port, task, costs)) for task in tasks for port in task.gives]

    def total(ports: list[tuple[Port, int]], content: Content, *media: Medium) -> int:
        return sum(size for port, size in ports if port.content is content and port.medium in media)

    return Volumes(
        weights_in=total(taken, Content.WEIGHTS, Medium.SHARED),
        data_in=total(taken, Content.INPUT, Medium.DATA),
        stash_in=total(taken, Content.STASH, *_HOST),
        stash_out=total(given, Content.STASH, *_HOST),
        input_in=total(taken, Content.INPUT, *_HOST),
        input_out=total(given, Content.INPUT, *_HOST),
        gradient_in=total(taken, Content.GRADIENT, *_HOST),
        gradient_out=total(given, Content.GRADIENT, *_HOST),
        weight_gradients_out=total(given, Content.WEIGHT_GRADIENTS, Medium.SHARED),
        peer=total(taken, Content.INPUT, Medium.PEER) + total(taken, Content.GRADIENT, Medium.PEER),
        all_reduced=total(given, Content.WEIGHT_GRADIENTS, Medium.REDUCE),
    )


def _bytes(port: Port, task: DeviceTask, costs: PackCosts) -> int:
    if port.content in (Content.WEIGHTS, Content.WEIGHT_GRADIENTS):
        return costs.state_bytes(port.first, port.last)
    return costs.input_bytes(port.first, task.samples)
