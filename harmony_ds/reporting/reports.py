"""Reports of an engine after a step: small typed objects that print well."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from harmony_ds.scheduler.grid import amount, counted, duration
from harmony_ds.scheduler.joining import Advice
from harmony_ds.scheduler.search import Choice
from harmony_ds.scheduler.swaps import Swaps
from harmony_ds.scheduler.tiles import Tiles

_ALTERNATIVES, _DIFFERENCE = 3, 0.01
_GIB = 2**30


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
        moved = [(into + self.device_to_host[kind], kind) for kind, into in self.host_to_device.items()]
        for nbytes, kind in sorted(moved, reverse=True):
            if nbytes:
                into, out = self.host_to_device[kind], self.device_to_host[kind]
                lines.append(f"  {kind:<36}{amount(into):>17}{amount(out):>16}")
        times = f" = {self.ratio:.4f} x the lower bound" if self.swap_bytes else ": nothing is swapped"
        lines.append(f"  weights and gradients {amount(self.swap_bytes)}{times}")
        if self.swap_bytes:
            saved = self.zero3_offload_bytes / self.swap_bytes
            lines.append(f"  ZeRO-3 offload would move {amount(self.zero3_offload_bytes)}, {saved:.1f} x as much")
        if self.beside_calls:
            lines.append(
                f"  beside the step, {counted(self.beside_calls, 'call')} without gradients: {amount(self.beside_bytes)} = "
                f"{self.beside_ratio:.4f} x the lower bound"
            )
        if self.sent_bytes:
            lines.append(f"  sent to other devices {amount(self.sent_bytes)}")
        if len(self.links) > 1:
            for device, (into, out) in enumerate(self.links):
                lines.append(f"  {f'link of device {device}':<36}{amount(into):>17}{amount(out):>16}")
            for (source, target), nbytes in sorted(self.between_devices.items()):
                lines.append(f"  from device {source} to {target} {amount(nbytes)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes on the device and on the host.

    Attributes:
        device_peak_bytes: the most in use during the last step, and what has run of the open one (on CUDA, since the model
            was last measured, or since the program has reset the peak); of several devices, on the one with most.
        planned_peak_bytes: predicted by the plan; more where losses or outputs that are read early take more.
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
        planned_reserved_bytes: what that allocator has to reserve for the plan, as planning's replay of the plan's requests
            says; None: not replayed.
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
    planned_reserved_bytes: int | None = None
    allocator_retries: int = 0

    def __str__(self) -> str:
        budget = "unlimited" if self.budget_bytes is None else amount(self.budget_bytes)
        planned = f"planned {amount(self.planned_peak_bytes)}" if self.planned_peak_bytes else "no plan yet"
        how = "as the allocator counts" if self.counted == "allocator" else "as the plan counts"
        lines = [f"device peak {amount(self.device_peak_bytes)} ({how}), {planned}, budget {budget}"]
        if self.beside_bytes:
            lines.append(f"beside the plan {amount(self.beside_bytes)}")
        if len(self.device_peaks) > 1:
            lines.append(f"each device {', '.join(map(amount, self.device_peaks))}")
        if self.reserved_bytes is not None:
            beyond = _beyond(self.reserved_bytes, self.planned_peak_bytes)
            lines.append(
                f"reserved by the allocator {amount(self.reserved_bytes)} ({beyond}), retries {self.allocator_retries:,}"
            )
        if self.planned_reserved_bytes is not None:
            beyond = _beyond(self.planned_reserved_bytes, self.planned_peak_bytes)
            lines.append(f"to be reserved for the plan {amount(self.planned_reserved_bytes)} ({beyond}), as replayed")
        kinds = [(nbytes, kind) for kind, nbytes in self.host_bytes.items() if nbytes]
        host = ", ".join(f"{kind} {amount(nbytes)}" for nbytes, kind in sorted(kinds, reverse=True))
        lines.append(f"host {amount(sum(self.host_bytes.values()))}{': ' if host else ''}{host}")
        if self.disk_bytes:
            lines.append(f"disk {amount(self.disk_bytes)}")
        return "\n".join(lines)


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
        typical = self.typical_step_ms
        measured = f"not measured yet (a plan's first step, {duration(self.last_step_ms)}, does not count)"
        if typical is not None:
            measured = f"{duration(typical)} measured{_compared(typical, prediction.step_ms)}"
        elif self.deviation:
            measured = "not measured"
        lines = [
            f"plan: {self.choices[0].reason}",
            f"  step          {duration(prediction.step_ms)} predicted, {measured}; {prediction.bottleneck} works most, "
            f"the device computes {1 - prediction.idle_share:.0%} of the time",
            f"  device peak   {amount(best.peak_bytes)} planned, {amount(self.device_peak_bytes)} measured",
        ]
        reserved_bytes = self.choices[0].reserved_bytes
        if reserved_bytes is not None:
            beyond = _beyond(reserved_bytes, best.peak_bytes)
            lines.append(f"  allocator     {amount(reserved_bytes)} to be reserved ({beyond}), as replayed")
        lines.append(f"  swapped       {amount(self.planned.total)} planned, {amount(self.swapped_bytes)} counted")
        if self.deviation:
            lines.append(f"  last step     {duration(self.last_step_ms)}, not as planned: {self.deviation}")
        tiles = Tiles.from_policy(best.policy)
        if tiles.cut:
            lines.append(f"  tiles         {tiles}")
        sent, moved = self.planned.sent, self.planned.moved
        if sent:
            lines.append(f"  between       {amount(sent)} to other devices planned, {amount(self.sent_bytes)} counted")
        if moved:
            lines.append(f"  moved         {amount(moved)} between devices planned, {amount(self.moved_bytes)} counted")
        if self.advice is not None:
            lines.append(f"  advice        {self.advice}")
        for choice in self.alternatives:
            ms, peak_bytes = choice.prediction.step_ms, choice.plan.peak_bytes
            lines.append(f"  instead       {duration(ms)}, peak {amount(peak_bytes)}: {choice.reason}")
        return "\n".join(lines)

    @property
    def alternatives(self) -> tuple[Choice, ...]:
        """At most three of the plans that were not chosen, the fastest first, each of which differs from the others shown
        by a percent or more in time or in device peak.
        """
        shown = [self.choices[0]]
        for choice in sorted(self.choices[1:], key=_step_ms):
            if len(shown) <= _ALTERNATIVES and all(_differ(choice, one) for one in shown):
                shown.append(choice)
        return tuple(shown[1:])


def _compared(measured_ms: float, predicted_ms: float) -> str:
    """Return how much longer or shorter a step takes than predicted, for people; "" if nothing is predicted."""
    return f" ({measured_ms / predicted_ms:.2f} x the prediction)" if predicted_ms else ""


def _beyond(reserved_bytes: int, planned_bytes: int) -> str:
    """Return the bytes that the allocator reserves beyond the plan's peak, in GiB for people."""
    return f"{(reserved_bytes - planned_bytes) / _GIB:+.2f} GiB beyond the planned peak"


def _step_ms(choice: Choice) -> float:
    return choice.prediction.step_ms


def _differ(choice: Choice, other: Choice) -> bool:
    """Return whether two plans differ by a percent or more in time or in device peak."""
    pairs = (
        (choice.prediction.step_ms, other.prediction.step_ms),
        (choice.plan.peak_bytes, other.plan.peak_bytes),
    )
    return any(abs(one - another) >= _DIFFERENCE * max(one, another) > 0 for one, another in pairs)
