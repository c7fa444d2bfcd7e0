"""Reports of an engine after a step: small typed objects that print well."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from harmony_ds.scheduler.grid import counted
from harmony_ds.scheduler.joining import Advice
from harmony_ds.scheduler.search import Choice
from harmony_ds.scheduler.swaps import Swaps
from harmony_ds.scheduler.tiles import Tiles


@dataclass(frozen=True, slots=True)
class SwapReport:
    """Bytes between host and device in one optimizer step.

    Attributes:
        host_to_device, device_to_host: by kind: "weights", "gradients", "activations", "data".
        lower_bound_bytes: weights in once per pack and pass (the last pack once), gradients out once per pack.
        zero3_offload_bytes: of ZeRO-3 with parameter and optimizer offload in the same step: weights in twice, gradients
            in and out for every micro-batch, and the fp32 gradients out once.
        micro_batches: in the step.
        sent_bytes: sent by this process's device to others'.
        between_devices: from one to another of the devices that this process drives, by their numbers.
        links: weights, gradients and activations to and from each of these devices.
        beside_calls: calls of the engine without gradients since the step before (a reference model's, an evaluation's,
            `generate`), which are not in the numbers above.
        beside_bytes: weights that they swapped in.
    """

    host_to_device: dict[str, int]
    device_to_host: dict[str, int]
    lower_bound_bytes: int
    zero3_offload_bytes: int
    micro_batches: int
    sent_bytes: int = 0
    between_devices: dict[tuple[int, int], int] = field(default_factory=dict)
    links: tuple[tuple[int, int], ...] = ()
    beside_calls: int = 0
    beside_bytes: int = 0

    @property
    def swap_bytes(self) -> int:
        """Weights and gradients, both ways."""
        return sum(
            side[kind] for side in (self.host_to_device, self.device_to_host) for kind in ("weights", "gradients")
        )

    @property
    def ratio(self) -> float:
        """Weight and gradient traffic over its lower bound; 1.0 is best."""
        return self.swap_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0

    @property
    def beside_ratio(self) -> float:
        """Weights that calls without gradients swapped in, over the lower bound of the step."""
        return self.beside_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 0.0

    def __str__(self) -> str:
        title = f"swaps of one step, {counted(self.micro_batches, 'micro-batch')}"
        lines = [f"{title:<38}{'to device':>17}{'to host':>16}"]
        lines += [
            f"  {kind:<36}{self.host_to_device[kind]:>17,}{self.device_to_host[kind]:>16,}"
            for kind in self.host_to_device
        ]
        lines.append(f"  weights and gradients {self.swap_bytes:,} bytes = {self.ratio:.4f} x the lower bound")
        if self.swap_bytes:
            saved = self.zero3_offload_bytes / self.swap_bytes
            lines.append(f"  ZeRO-3 offload would move {self.zero3_offload_bytes:,} bytes, {saved:.1f} x as much")
        if self.beside_calls:
            lines.append(
                f"  beside the step, {counted(self.beside_calls, 'call')} without gradients: {self.beside_bytes:,} bytes = "
                f"{self.beside_ratio:.4f} x the lower bound"
            )
        if self.sent_bytes:
            lines.append(f"  sent to other devices {self.sent_bytes:,} bytes")
        if len(self.links) > 1:
            for device, (into, out) in enumerate(self.links):
                lines.append(f"  {f'link of device {device}':<36}{into:>17,}{out:>16,}")
            for (source, target), nbytes in sorted(self.between_devices.items()):
                lines.append(f"  from device {source} to {target} {nbytes:,} bytes")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes on the device and on the host.

    Attributes:
        device_peak_bytes: the most in use during the last step, and what has run of the open one (on CUDA, since the model
            was last measured, or since the program has reset the peak); of several devices, on the one with most.
        planned_peak_bytes: predicted by the plan.
        budget_bytes: the limit (None: unlimited).
        host_bytes: by kind: "weights", "masters", "optimizer", "gradients", "stash"; "casts": of 16-bit gradients
            for an optimizer that steps fp32; "chunks" of weights from a disk.
        disk_bytes: of the files for masters and optimizer state, and for weights ("device": "nvme").
        counted: "allocator" where activations are counted as they are allocated, "plan" where they are charged as
            measured per layer (the CPU device).
        device_peaks: the most in use on each device that this process drives.
        beside_bytes: of the budget, but of no plan: libraries' workspaces, bytes that the allocator cannot hand out,
            tensors that were on the device before.
        reserved_bytes: the most that torch's caching allocator has held on a device, in use or not, since the same time as
            `device_peak_bytes`; None: the device has no such allocator.
        allocator_retries: how often, since the engine was made, that allocator had no room for a request until it gave back
            all memory that nothing used.
    """

    device_peak_bytes: int
    planned_peak_bytes: int
    budget_bytes: int | None
    host_bytes: dict[str, int]
    counted: str
    beside_bytes: int = 0
    device_peaks: tuple[int, ...] = ()
    disk_bytes: int = 0
    reserved_bytes: int | None = None
    allocator_retries: int = 0

    def __str__(self) -> str:
        budget = "unlimited" if self.budget_bytes is None else f"{self.budget_bytes:,}"
        host = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in self.host_bytes.items())
        several = len(self.device_peaks) > 1
        each = f"\neach device {', '.join(f'{peak:,}' for peak in self.device_peaks)}" if several else ""
        reserved = ""
        if self.reserved_bytes is not None:
            reserved = f"\nreserved by the allocator {self.reserved_bytes:,} bytes, retries {self.allocator_retries:,}"
        return (
            f"device peak {self.device_peak_bytes:,} bytes ({self.counted}), planned {self.planned_peak_bytes:,}, "
            f"budget {budget}{each}{reserved}\nhost {sum(self.host_bytes.values()):,} bytes: {host}"
            f"{f', disk {self.disk_bytes:,}' if self.disk_bytes else ''}"
        )


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Predictions for the plan that runs, and measurements of it.

    Attributes:
        choices: the plan that runs, and the next best that the search found, each with its prediction.
        measured_step_ms: of each step since the plan was made that ran as planned, but the first; without the caller's own
            time.
        device_peak_bytes: as in `MemoryReport`.
        swapped_bytes: weights, gradients and stash in the last step, both ways.
        sent_bytes: sent by this process's device to others' in the last step.
        planned: the bytes that this process's device moves in a step, by the plan.
        moved_bytes: between the devices that this process drives in the last step.
        advice: joined layer calls that are predicted to be much faster.
        last_step_ms: of the last step, whether or not it ran as planned.
        deviation: how the last step differed from what the plan's time is predicted for; "": not at all.
    """

    choices: tuple[Choice, ...]
    measured_step_ms: tuple[float, ...]
    device_peak_bytes: int
    swapped_bytes: int
    sent_bytes: int
    planned: Swaps
    moved_bytes: int = 0
    advice: Advice | None = None
    last_step_ms: float = 0.0
    deviation: str = ""

    @property
    def predicted_step_ms(self) -> float:
        return self.choices[0].prediction.step_ms

    @property
    def typical_step_ms(self) -> float | None:
        """The median of the measured steps; None before the second."""
        return statistics.median(self.measured_step_ms) if self.measured_step_ms else None

    @property
    def time_error(self) -> float | None:
        """Predicted over measured step time, less 1."""
        typical = self.typical_step_ms
        return None if typical is None else self.predicted_step_ms / typical - 1

    @property
    def peak_error(self) -> float:
        """Planned over measured device peak, less 1; never below 0."""
        return self.choices[0].plan.peak_bytes / self.device_peak_bytes - 1 if self.device_peak_bytes else 0.0

    def __str__(self) -> str:
        best, prediction = self.choices[0].plan, self.choices[0].prediction
        typical, error = self.typical_step_ms, round(self.time_error or 0.0, 3) + 0.0  # never -0.0
        measured = f"not measured yet (a plan's first step, {self.last_step_ms:,.1f} ms, does not count)"
        if typical is not None:
            measured = f"{typical:,.1f} ms measured ({error:+.1%})"
        elif self.deviation:
            measured = "not measured"
        lines = [
            f"plan: {self.choices[0].reason}",
            f"  step          {prediction.step_ms:,.1f} ms predicted, {measured}; {prediction.bottleneck} works most, "
            f"the device computes {1 - prediction.idle_share:.0%} of the time",
            f"  device peak   {best.peak_bytes:,} bytes planned, {self.device_peak_bytes:,} measured "
            f"({self.peak_error:+.1%})",
            f"  swapped       {self.planned.total:,} bytes planned, {self.swapped_bytes:,} counted",
        ]
        if self.deviation:
            lines.append(f"  last step     {self.last_step_ms:,.1f} ms, not as planned: {self.deviation}")
        tiles = Tiles.from_policy(best.policy)
        if tiles.cut:
            lines.append(f"  tiles         {tiles}")
        sent, moved = self.planned.sent, self.planned.moved
        if sent:
            lines.append(f"  between       {sent:,} bytes to other devices planned, {self.sent_bytes:,} counted")
        if moved:
            lines.append(f"  moved         {moved:,} bytes between devices planned, {self.moved_bytes:,} counted")
        lines += [
            f"  {rank}. instead   {choice.prediction.step_ms:,.1f} ms, peak {choice.plan.peak_bytes:,}: {choice.reason}"
            for rank, choice in enumerate(self.choices[1:], start=2)
        ]
        if self.advice is not None:
            lines.append(f"  advice        {self.advice}")
        return "\n".join(lines)
