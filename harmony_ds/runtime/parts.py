"""The parts of an engine that run its model, made once and handed on together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harmony_ds.calls.contract import Contract
from harmony_ds.calls.crossing import Crossings
from harmony_ds.calls.installed import Installation
from harmony_ds.calls.joined import Joins
from harmony_ds.calls.layer_call import LayerCalls
from harmony_ds.calls.random_streams import RandomStreams
from harmony_ds.device.base import Device
from harmony_ds.offload.device_store import DeviceStore
from harmony_ds.offload.host_gradients import HostGradients
from harmony_ds.offload.host_optimizer import HostOptimizer
from harmony_ds.offload.residency import Residency
from harmony_ds.offload.stash import Stash
from harmony_ds.offload.updater import Updater
from harmony_ds.offload.user_gradients import UserGradients
from harmony_ds.parallel import SingleProcess
from harmony_ds.runtime.timeline import StepTimeline


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that run a model. Without an optimizer, no gradients come and nothing is updated."""

    device: Device
    residency: Residency
    device_store: DeviceStore
    stash: Stash
    gradients: HostGradients
    optimizer: HostOptimizer | None
    updater: Updater
    installation: Installation
    contract: Contract
    crossings: Crossings
    layer_calls: LayerCalls
    joins: Joins
    random: RandomStreams
    timeline: StepTimeline
    user_gradients: UserGradients
    world: SingleProcess
    copy_masters_to_weights: Callable[[Iterable[str]], None]
    """Make weights of the compute dtype follow their masters."""
