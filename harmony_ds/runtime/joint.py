"""Several micro-batches that go through the layers as one: each has a lane of its own, and they take turns between layers.

What makes of them one micro-batch for the executor is that their calls of a layer are joined (`harmony_ds.calls.joined`),
where they can be; the code between layers, and the loss, see single ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harmony_ds.calls.contract import UnseenError
from harmony_ds.calls.intercept import Around, Request
from harmony_ds.calls.joined import RAISED, Joined, Joins
from harmony_ds.calls.trees import tensors_in
from harmony_ds.device.base import Device
from harmony_ds.runtime.lane import Answer, Lane, Place
from harmony_ds.runtime.micro_batch import MicroBatch, OffPlanError


class JointLane:
    """Lanes of several micro-batches, which go from layer to layer together."""

    def __init__(self, lanes: list[Lane], joins: Joins) -> None:
        self._lanes = lanes
        self._joins = joins
        self._calls: list[Joined] = []  # that are to be made

    @property
    def finished(self) -> bool:
        """Whether all lanes have come to their ends."""
        return all(lane.finished for lane in self._lanes)

    def waiting_tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments of the calls to be made, which are joined."""
        requests = [lane.request for lane in self._lanes if lane.request is not None]
        return tensors_in([(call.request.args, call.request.kwargs) for call in self._joined(requests)])

    def run_on(self, place: Place, answer: Answer, last: int | None = None) -> None:
        """Do what `Lane.run_on` does, with one call for all where they can be joined.

        Raises:
            CannotJoinError: they take different ways, or something went wrong, and must run one by one.
        """
        try:
            while not self.finished:
                requests = [lane.request for lane in self._lanes if lane.request is not None]
                if len(requests) < len(self._lanes) or len({request.layer for request in requests}) > 1:
                    raise self._joins.refuse("micro-batches take different ways through the model")
                position = place(requests[0])
                if last is not None and position > last:
                    return
                replies = self._answered(requests, position, answer)
                requests.clear()
                for lane in self._lanes:
                    lane.resume(replies.pop(0))
        except (OffPlanError, UnseenError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self._joins.refuse(f"the model raised {error!r}", RAISED) from error

    def _joined(self, requests: list[Request]) -> list[Joined]:
        if not self._calls and requests:
            with torch.enable_grad():
                self._calls = self._joins.join(requests)
        return self._calls

    def _answered(self, requests: list[Request], position: int, answer: Answer) -> list[Any]:
        """Return what each lane gets."""
        replies: dict[int, Any] = {}
        for call in self._joined(requests):
            result = answer(call.request, position)
            with torch.enable_grad():
                replies.update(zip(call.places, self._joins.part(call, result), strict=True))
        self._calls = []
        return [replies[place] for place in range(len(requests))]

    @property
    def result(self) -> list[Any]:
        """Results of the lanes, in their order."""
        return [lane.result for lane in self._lanes]

    def close(self) -> None:
        """End all lanes wherever they are."""
        self._calls = []
        for lane in self._lanes:
            lane.close()


_CALLED = ("index", "seed", "forward", "autocast", "backward_autocast", "context", "state", "home")


@dataclass(slots=True, eq=False)
class JointMicroBatch(MicroBatch):
    """Several micro-batches as one."""

    members: Sequence[MicroBatch] = ()
    joins: Joins | None = None

    @staticmethod
    def of(members: Sequence[MicroBatch], joins: Joins) -> JointMicroBatch:
        """Join `members`, which were called in the same modes; random numbers are those of the first one."""
        first = {name: getattr(members[0], name) for name in _CALLED}
        objective = partial(_sum_of, members)
        return JointMicroBatch(objective=objective, count=len(members), members=members, joins=joins, **first)

    def start(self, device: Device, between_layers: Around | None) -> Any:
        assert self.joins is not None
        lanes = [member.new_lane(device, between_layers) for member in self.members]
        self.lane = JointLane(lanes, self.joins)  # type: ignore[assignment]
        for lane in lanes:
            lane.resume()
        return self.lane


def _sum_of(members: Sequence[MicroBatch], outputs: Sequence[Any]) -> Tensor | None:
    losses = [m.objective(own) for m, own in zip(members, outputs, strict=True)]
    known = [loss for loss in losses if loss is not None and loss.requires_grad]
    return sum(known[1:], known[0]) if known else None
