"""Several micro-batches that go through the layers as one: each has a lane of its own, and they take turns between layers.

What makes of them one micro-batch for the executor is that their calls of a layer are joined (`harmony_ds.model.joined`),
where they can be; the code between layers, and the loss, see single ones, and draw from their random streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harmony_ds.device.base import Device
from harmony_ds.model.contract import UnseenError
from harmony_ds.model.intercept import ContextFactory, Request
from harmony_ds.model.joined import RAISED, Joined, Joins
from harmony_ds.model.own_settings import LaneSettings, in_force
from harmony_ds.model.random_streams import RandomStreams, states_differ
from harmony_ds.model.trees import tensors_in
from harmony_ds.runtime.failure import FailedCall
from harmony_ds.runtime.lane import AnyLane, Lane, LayerCallRunner, PositionOf
from harmony_ds.runtime.micro_batch import MicroBatch, OffPlanError


class JointLane:
    """Lanes of several micro-batches, which go from layer to layer together."""

    def __init__(self, lanes: list[Lane], joins: Joins, streams: MemberStreams) -> None:
        self.lanes = lanes
        self._joins = joins
        self._streams = streams
        self._calls: list[Joined] = []  # that are to be made

    def start(self) -> None:
        """Run each lane up to its first layer call."""
        engine_thread = self.lanes[0].read_thread()
        with self._streams.of_members():
            for number, lane in enumerate(self.lanes):
                self._streams.start(number)
                lane.resume(engine_thread=engine_thread)

    @property
    def failed_call(self) -> FailedCall | None:
        """The last layer call that has raised an error in one of the lanes; joined calls run one by one after an error."""
        return next((lane.failed_call for lane in self.lanes if lane.failed_call is not None), None)

    @property
    def finished(self) -> bool:
        """Whether all lanes have come to their ends."""
        return all(lane.finished for lane in self.lanes)

    def waiting_tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments of the calls to be made, which are joined."""
        requests = self._waiting_requests()
        return tensors_in([(call.request.args, call.request.kwargs) for call in self._joined(requests)])

    def argument_tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments of the calls that lanes wait at, which are not joined for that."""
        return [tensor for lane in self.lanes for tensor in lane.waiting_tensors()]

    def run_on(self, position_of: PositionOf, answer: LayerCallRunner, last: int | None = None) -> None:
        """Do what `Lane.run_on` does, with one call for all where they can be joined.

        Raises:
            CannotJoinError: they take different ways, or something went wrong, and must run one by one.
        """
        engine_thread = self.lanes[0].read_thread()
        try:
            while requests := self._waiting_requests():
                if _set_requires_grad(requests):
                    raise self._joins.refuse("the code between layers sets requires_grad")
                if len(requests) < len(self.lanes) or len({request.layer for request in requests}) > 1:
                    raise self._joins.refuse("micro-batches take different ways through the model")
                position = position_of(requests[0])
                if last is not None and position > last:
                    return
                replies = self._answered(requests, position, answer)
                requests.clear()
                with self._streams.of_members():
                    for number, lane in enumerate(self.lanes):
                        self._streams.switch(number)
                        lane.resume(replies.pop(0), engine_thread)
        except (OffPlanError, UnseenError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self._joins.refuse(f"the model raised {error!r}", RAISED) from error

    def _waiting_requests(self) -> list[Request]:
        """Return the layer calls that lanes wait at; none when all have come to their ends."""
        return [lane.request for lane in self.lanes if lane.request is not None]

    def _joined(self, requests: list[Request]) -> list[Joined]:
        if not self._calls and requests:
            with torch.enable_grad():
                self._calls = self._joins.join(requests)
        return self._calls

    def _answered(self, requests: list[Request], position: int, answer: LayerCallRunner) -> list[Any]:
        """Return what each lane gets."""
        replies: dict[int, Any] = {}
        for call in self._joined(requests):
            with in_force(call.request.lane_settings):
                result = answer(call.request, position)
            with torch.enable_grad():
                replies.update(zip(call.places, self._joins.part(call, result), strict=True))
        self._calls = []
        return [replies[number] for number in range(len(requests))]

    lane_settings: LaneSettings | None = None  # each lane has its own

    @property
    def result(self) -> list[Any]:
        """Results of the lanes, in their order."""
        return [lane.result for lane in self.lanes]

    def close(self) -> None:
        """End all lanes wherever they are."""
        self._calls = []
        for lane in self.lanes:
            lane.close()


def _set_requires_grad(requests: list[Request]) -> bool:
    """Return whether the code that makes one of `requests` has set `requires_grad` of parameters for itself."""
    return any(request.lane_settings is not None and request.lane_settings.trained for request in requests)


class MemberStreams:
    """Random streams of the micro-batches of a set, which code between layers and losses draw from.

    Joined calls draw from the stream of the set. So does everything, as long as only layers are known to draw: to switch
    streams takes about as long as a small operation.
    """

    def __init__(self, members: Sequence[MicroBatch], joins: Joins, random: RandomStreams) -> None:
        """Take the stream that has just begun for the set's."""
        self._members = members
        self._joins = joins
        self._random = random
        self._are_apart = joins.code_between_draws
        self._at_start = random.snapshot()

    @contextmanager
    def of_members(self) -> Iterator[None]:
        """Let streams be switched while open; in the end the set's is current again."""
        of_set = self._random.current
        yield
        assert of_set is not None
        self._random.switch(of_set)

    def start(self, member: int) -> None:
        """Begin the stream of a member and make it current."""
        if self._are_apart:
            self._random.start(self._members[member], self._members[member].seed)

    def switch(self, member: int) -> None:
        """Make the stream of a member current."""
        if self._are_apart:
            self._random.switch(self._members[member])

    def enter_loss(self, member: int) -> None:
        """Make the stream of a member current, which nothing has drawn from if that was not begun."""
        if self._are_apart:
            self.switch(member)
        else:
            self._random.start(self._members[member], self._members[member].seed)

    def check(self) -> None:
        """Raise UnseenError if the code between layers has drawn from the stream of the set."""
        if self._are_apart or self._joins.are_random:
            return
        if states_differ(self._at_start, self._random.snapshot()):
            self._joins.code_between_draws = True
            raise UnseenError("the code between layers draws random numbers, which was not seen when it was measured.")


@dataclass(slots=True, eq=False)
class JointMicroBatch(MicroBatch):
    """Several micro-batches whose layer calls are joined: for the executor they are one micro-batch."""

    members: Sequence[MicroBatch] = ()
    joins: Joins | None = None
    random: RandomStreams | None = None

    @staticmethod
    def join(members: Sequence[MicroBatch], joins: Joins, random: RandomStreams) -> JointMicroBatch:
        """Join `members`, which were called in the same modes; joined calls draw the random numbers of the first one."""
        first = members[0]
        return JointMicroBatch(
            index=first.index,
            seed=first.seed,
            forward=first.forward,
            objective=no_loss,
            autocast=first.autocast,
            state=first.state,
            home=first.home,
            device=first.device,
            backward_autocast=first.backward_autocast,
            context=first.context,
            count=len(members),
            members=members,
            joins=joins,
            random=random,
        )

    def start(self, device: Device, between_layers: ContextFactory | None) -> AnyLane:
        assert self.joins is not None
        assert self.random is not None
        streams = MemberStreams(self.members, self.joins, self.random)
        self.objective = partial(_sum_of_losses, self.members, streams)
        lanes = [member.new_lane(device, between_layers) for member in self.members]
        joint = self.lane = JointLane(lanes, self.joins, streams)
        joint.start()
        return joint

    def reset(self) -> None:
        for member in self.members:
            member.reset()
        MicroBatch.reset(self)  # super() knows another class, the one before it got slots

    def finish(self) -> None:
        joint = self.lane
        assert isinstance(joint, JointLane)
        for member, lane in zip(self.members, joint.lanes, strict=True):
            member.lane_settings = lane.lane_settings
        MicroBatch.finish(self)


def no_loss(outputs: Any) -> None:
    """Propagate back from nothing: the objective before the lanes are there."""


def _sum_of_losses(members: Sequence[MicroBatch], streams: MemberStreams, outputs: Sequence[Any]) -> Tensor | None:
    """Return the sum of what `members`, whose forward passes gave `outputs`, propagate back from."""
    streams.check()
    losses = []
    with streams.of_members():
        for number, (member, own) in enumerate(zip(members, outputs, strict=True)):
            streams.enter_loss(number)
            with in_force(member.lane_settings):
                loss = member.objective(own)
            if loss is not None:
                losses.append(loss)
    return sum(losses[1:], losses[0]) if losses else None
