"""The objects that run the model of an engine, made once by `assemble` and handed on together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harmony_ds.device.base import Device
from harmony_ds.distributed import SingleProcess
from harmony_ds.model.contract import Contract
from harmony_ds.model.device_transfers import DeviceTransfers
from harmony_ds.model.installed import Installation
from harmony_ds.model.joined import Joins
from harmony_ds.model.layer_call import LayerCalls
from harmony_ds.model.random_streams import RandomStreams
from harmony_ds.offload.crossing_tensors import CrossingTensors
from harmony_ds.offload.device_copies import DeviceCopies
from harmony_ds.offload.host_gradients import HostGradients
from harmony_ds.offload.stash import Stash
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.optim.resident_packs import ResidentPacks
from harmony_ds.optim.updater import Updater
from harmony_ds.optim.user_gradients import UserGradients
from harmony_ds.runtime.timeline import StepTimeline


@dataclass(frozen=True, slots=True)
class Runtime:
    """The objects that run one engine's model. Without an optimizer, no gradients come and nothing is updated."""

    device: Device
    device_copies: DeviceCopies
    resident_packs: ResidentPacks
    stash: Stash
    crossing_tensors: CrossingTensors
    host_gradients: HostGradients
    optimizer: HostOptimizer | None
    updater: Updater
    installation: Installation
    contract: Contract
    device_transfers: DeviceTransfers
    layer_calls: LayerCalls
    joins: Joins
    random: RandomStreams
    timeline: StepTimeline
    user_gradients: UserGradients
    world: SingleProcess
    copy_masters_to_weights: Callable[[Iterable[str]], None]
    """Make weights of the compute dtype follow their masters."""
