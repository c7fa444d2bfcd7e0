"""Machines that are described instead of measured: GPU, link and host by name, from `hardware.json`.

A machine's name is `gpu`, `gpu/link`, `gpu/host` or `gpu/link/host` ("rtx4090", "rtx4090/pcie3", "a100-80/epyc-ddr5");
what is left out is what the GPU usually comes with. Every number in the file names its source; those that no datasheet
gives (the share of a peak that real kernels reach) are marked "typical".
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from harmony_ds.errors import ConfigError
from harmony_ds.scheduler.profile import Machine

_GIB = 2**30
_PER_MS = 1e9 / 1e3  # from GB/s to bytes per ms
_TERA_PER_MS = 1e12 / 1e3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device, as its vendor describes it.

    Attributes:
        fp32_tflops, tf32_tflops, half_tflops: dense peaks: of plain fp32; of tensor cores in tf32; of tensor cores in
            bf16 or fp16 with fp32 accumulation.
        peer_gb_per_s: what it sends to its neighbours while it receives as much (NVLink); 0: that goes over PCIe.
        link, host: what it usually comes with.
    """

    name: str
    memory_gib: float
    fp32_tflops: float
    tf32_tflops: float
    half_tflops: float
    memory_gb_per_s: float
    link: str
    host: str
    source: str
    peer_gb_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """Between host and device: the nominal rate of each direction, and what page-locked copies achieve."""

    name: str
    nominal_gb_per_s: float
    one_way_gb_per_s: float
    both_ways_gb_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Host:
    """Memory and processor of one socket."""

    name: str
    memory_gib: float
    channels: int
    mega_transfers_per_s: int
    cores: int
    source: str

    @property
    def nominal_gb_per_s(self) -> float:
        """Eight bytes per transfer and channel."""
        return self.channels * self.mega_transfers_per_s * 8 / 1e3


@dataclass(frozen=True, slots=True)
class Typical:
    """Values that no datasheet says.

    Attributes:
        matmul_share, attention_share: of the peak, reached by matrix products and by fused attention.
        bandwidth_share, host_bandwidth_share: of the memory's nominal rate.
        kernel_us: issuing one operation; no operation takes less.
        task_us: the engine's own work per task.
        swap_us: fixed cost of one copy.
        usable_device_share, usable_host_share: of the memory.
    """

    matmul_share: float
    attention_share: float
    bandwidth_share: float
    host_bandwidth_share: float
    kernel_us: float
    task_us: float
    swap_us: float
    usable_device_share: float
    usable_host_share: float


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """The memory traffic of updating one parameter.

    Attributes:
        states: numbers that the optimizer keeps per parameter (2 for Adam).
        gradient_bytes: of one element of the gradient, as it arrives.
        copy_bytes: of one element of the compute-dtype copy that is written beside the master; 0 without one.
        master_bytes, state_bytes: of one element of the master, and of one of those numbers.
        disk_bytes: of those that lie on a disk.
        disk_weight_bytes: of a weight that does.
    """

    states: int
    gradient_bytes: int
    copy_bytes: int
    master_bytes: int = 4
    state_bytes: int = 4
    disk_bytes: int = 0
    disk_weight_bytes: int = 0

    @property
    def bytes_per_element(self) -> float:
        """Gradient read; master and states read and written; copy written. Adam in mixed precision: 4 + 24 + 2 = 30."""
        kept = self.master_bytes + self.states * self.state_bytes
        return self.gradient_bytes + 2.0 * kept + self.copy_bytes


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU in a slot of a host.

    Attributes:
        disk_gb_per_s: what its disk reads or writes; None: not known.
    """

    gpu: Gpu
    link: Link
    host: Host
    typical: Typical
    disk_gb_per_s: float | None = None

    @property
    def name(self) -> str:
        return f"{self.gpu.name}/{self.link.name}/{self.host.name}"

    @property
    def device_budget_bytes(self) -> int:
        return int(int(self.gpu.memory_gib * _GIB) * self.typical.usable_device_share)

    @property
    def host_budget_bytes(self) -> int:
        return int(int(self.host.memory_gib * _GIB) * self.typical.usable_host_share)

    def machine(self, update: UpdateCost) -> Machine:
        """Return the rates that plans are simulated with.

        The host updates at the speed of its memory: every optimizer of DeepSpeed's CPU family does a few operations
        per byte, and its vector units are not what it waits for.
        """
        typical = self.typical
        host = self.host.nominal_gb_per_s * typical.host_bandwidth_share * _PER_MS
        device = self.gpu.memory_gb_per_s * typical.bandwidth_share * _PER_MS
        one_way = self.link.one_way_gb_per_s * _PER_MS
        machine = Machine(
            name=self.name,
            copies_overlap=True,
            swap_in_bytes_per_ms=one_way,
            swap_out_bytes_per_ms=one_way,
            link_bytes_per_ms=self.link.both_ways_gb_per_s * _PER_MS,
            update_elements_per_ms=host / update.bytes_per_element,
            norm_elements_per_ms=host / update.gradient_bytes,
            host_bytes_per_ms=host,
            device_update_elements_per_ms=device / update.bytes_per_element,
            swap_ms=typical.swap_us / 1e3,
            task_ms=typical.task_us / 1e3,
            update_bytes_per_element=update.bytes_per_element,
            device_bytes=self.device_budget_bytes,
            peer_bytes_per_ms=self.gpu.peer_gb_per_s * typical.bandwidth_share * _PER_MS,
        )
        disk = math.inf if self.disk_gb_per_s is None else self.disk_gb_per_s * _PER_MS
        return machine.with_disk(disk, 2.0 * update.disk_bytes, update.disk_weight_bytes)

    def kernels(self) -> KernelRates:
        """Return the rates that a layer's operations are timed with."""
        gpu, typical = self.gpu, self.typical
        return KernelRates(
            fp32_flops_per_ms=gpu.fp32_tflops * _TERA_PER_MS,
            half_flops_per_ms=gpu.half_tflops * _TERA_PER_MS,
            matmul_share=typical.matmul_share,
            attention_share=typical.attention_share,
            bytes_per_ms=gpu.memory_gb_per_s * typical.bandwidth_share * _PER_MS,
            kernel_ms=typical.kernel_us / 1e3,
        )


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Speed of a device's kernels.

    Attributes:
        fp32_flops_per_ms, half_flops_per_ms: peaks by dtype. fp32 products run without tf32: torch's default.
        matmul_share, attention_share: what of the peak is reached.
        bytes_per_ms: of device memory, as reached.
        kernel_ms: no operation takes less.
    """

    fp32_flops_per_ms: float
    half_flops_per_ms: float
    matmul_share: float
    attention_share: float
    bytes_per_ms: float
    kernel_ms: float


def hardware_of(name: str) -> Hardware:
    """Return the machine called `name`.

    Raises:
        ConfigError: a part of the name is unknown; says the nearest one.
    """
    catalogue = known_hardware()
    first, *rest = name.lower().split("/")
    gpu = catalogue.gpus.get(first)
    if gpu is None:
        raise ConfigError(_unknown(first, "GPU", catalogue.gpus))
    link, host = catalogue.links[gpu.link], catalogue.hosts[gpu.host]
    for part in rest:
        if part in catalogue.links:
            link = catalogue.links[part]
        elif part in catalogue.hosts:
            host = catalogue.hosts[part]
        else:
            raise ConfigError(_unknown(part, "link or host", {**catalogue.links, **catalogue.hosts}))
    return Hardware(gpu, link, host, catalogue.typical)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The content of `hardware.json`."""

    gpus: Mapping[str, Gpu]
    links: Mapping[str, Link]
    hosts: Mapping[str, Host]
    typical: Typical


@cache
def known_hardware() -> Catalogue:
    """Everything that has a name."""
    text = files("harmony_ds.profiling").joinpath("hardware.json").read_text(encoding="utf-8")
    data: dict[str, dict[str, Any]] = json.loads(text)
    return Catalogue(
        {name: Gpu(name, **values) for name, values in data["gpus"].items()},
        {name: Link(name, **values) for name, values in data["links"].items()},
        {name: Host(name, **values) for name, values in data["hosts"].items()},
        Typical(**{name: entry["value"] for name, entry in data["typical"].items()}),
    )


def _unknown(name: str, what: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    return f'there is no {what} called "{name}".{hint} Known: {", ".join(known)}.'
