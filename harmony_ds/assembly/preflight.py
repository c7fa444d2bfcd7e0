"""Refusals before an engine takes anything: what the ds_config asks for, and processes, devices or memory cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harmony_ds.config import Config, HarmonySettings
from harmony_ds.config.harmony import ResidencyChoice
from harmony_ds.decomposer.find import Layer, Room
from harmony_ds.device import Device
from harmony_ds.distributed import SingleProcess
from harmony_ds.errors import ConfigError, DoesNotFitError, UnsupportedError
from harmony_ds.offload.host_memory import HostNeed, check_host_memory
from harmony_ds.optim.device_optimizer import DeviceOptimizer
from harmony_ds.scheduler.grid import amount, gib_number
from harmony_ds.scheduler.plan import Plan

_UPDATED_ON_HOST = ("auto", "kept", "off", 0)
"""Values of `harmony.residency` with which every pack is updated on the host, or may be."""


def read_plan(path: str | None) -> Plan | None:
    """Return the plan in the file `harmony.plan`.

    Raises:
        ConfigError: the file holds none.
    """
    if path is None:
        return None
    try:
        return Plan.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"harmony.plan cannot be read: {error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"harmony.plan: {path} is no plan of this version of harmony_ds ({error!r}).") from error


def refuse_for_several_processes(config: Config, world: SingleProcess) -> None:
    """Raise UnsupportedError for settings that several processes cannot run."""
    harmony = config.harmony
    if harmony.residency not in _UPDATED_ON_HOST:
        world.refuse("harmony.residency: packs that stay on the device and are updated there")
    if world.servers > 1:
        if harmony.reduce == "host":
            raise _needs_shared_memory('reduce "host"', world.servers)
        if harmony.split_masters:
            raise _needs_shared_memory("split_masters", world.servers)
    if config.values["gradient_allreduce_op"] == "sum":
        world.refuse('gradient_allreduce_op "sum"')


def _needs_shared_memory(setting: str, servers: int) -> UnsupportedError:
    return UnsupportedError(f"harmony.{setting}: the {servers} servers of this training share no memory; leave it out.")


def refuse_small_budget(layers: Sequence[Layer], room: Room, reserve_bytes: int) -> None:
    """Raise DoesNotFitError if the budget cannot hold weights and gradients of a layer, whatever the plan.

    A layer without anything to train may be one that forward never calls, and is left to measuring.

    Args:
        reserve_bytes: of the budget that libraries' workspaces and the allocator take.
    """
    most_bytes, largest = 0, ""
    for layer in layers:
        nbytes = room.taken_by(layer.module)
        if nbytes > most_bytes and all(parameter.requires_grad for parameter in layer.module.parameters()):
            most_bytes, largest = nbytes, layer.name
    need_bytes = most_bytes + reserve_bytes
    if need_bytes <= room.budget_bytes:
        return
    reserved = (
        f" {reserve_bytes:,} bytes are set aside for libraries' workspaces and the allocator." if reserve_bytes else ""
    )
    raise DoesNotFitError(
        f"layer {largest} alone takes {most_bytes:,} bytes ({amount(most_bytes)}) of device memory for its weights and "
        f"gradients, and the budget is {room.budget_bytes:,} bytes.{reserved} Ways out: (1) raise "
        f"harmony.device_memory_gib, to well above {gib_number(need_bytes)} (GiB), since activations come beside them; (2) "
        "name smaller layers in harmony.layers."
    )


def refuse_for_several_devices(residency: ResidencyChoice, devices: int, saved_plan: Plan | None) -> None:
    """Raise UnsupportedError for a residency, or a saved plan, that several devices of one process cannot run."""
    if devices == 1:
        return
    if residency not in _UPDATED_ON_HOST:
        raise UnsupportedError(
            f"harmony.residency is {residency}, and {devices} devices run one plan (harmony.devices): "
            'none of their packs stays from step to step. Set it to "auto", "kept" or "off".'
        )
    if saved_plan is None:
        return
    packing = saved_plan.packing
    if saved_plan.policy.resident or len(packing.covering) > len(packing.backward):
        raise UnsupportedError(
            f"harmony.plan was made for one device: packs of it stay there, or the passes are cut differently, and "
            f"{devices} devices (harmony.devices) do neither. Plan again."
        )


def refuse_without_host_memory(need: HostNeed, world: SingleProcess) -> None:
    """Raise HostMemoryError if a server has too little: checked once for all of its processes, before any takes some."""
    if world.is_local_first:
        check_host_memory(replace(need, there_bytes=world.local_size * need.there_bytes))
    world.agree("the host has room")


def choose_residency(
    harmony: HarmonySettings, device: Device, optimizer: DeviceOptimizer | None, world: SingleProcess
) -> ResidencyChoice:
    """Return how this run uses spare device memory, which "auto" leaves open: "auto", "kept", "off", or a number of packs.

    After it, "auto" means that packs may be updated on the device.
    """
    if harmony.residency != "auto":
        return harmony.residency
    if harmony.pack_layers is not None or harmony.plan is not None:
        return "off"  # packs that were given are run as they are
    if device.budget_bytes is None:
        return "off"  # a device without a budget has no memory that could be spare
    if world.size > 1 or device.count > 1:
        return "kept"  # each of several processes updates pieces of a pack: none could update it on its device
    if optimizer is None or optimizer.refusal is not None:
        return "kept"
    return "auto"
