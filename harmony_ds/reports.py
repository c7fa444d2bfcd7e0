"""What the engine says about itself after a step: small typed objects that print well."""

from __future__ import annotations

from dataclasses import dataclass

from harmony_ds.offload.ledger import Kind, Traffic


@dataclass(frozen=True, slots=True)
class SwapReport:
    """Bytes between host and device in one optimizer step.

    Attributes:
        host_to_device, device_to_host: by kind: "weights", "gradients", "activations", "data".
        lower_bound_bytes: weights in once per pack and pass (the last pack once), gradients out once per pack.
        zero3_offload_bytes: what ZeRO-3 with parameter and optimizer offload would have moved for the same step:
            weights in twice, gradients in and out for every micro-batch, and the fp32 gradients out once.
        micro_batches: in the step.
    """

    host_to_device: dict[str, int]
    device_to_host: dict[str, int]
    lower_bound_bytes: int
    zero3_offload_bytes: int
    micro_batches: int

    @staticmethod
    def of(traffic: Traffic, lower_bound_bytes: int, zero3_offload_bytes: int, micro_batches: int) -> SwapReport:
        return SwapReport(
            {kind.value: traffic.host_to_device[kind] for kind in Kind},
            {kind.value: traffic.device_to_host[kind] for kind in Kind},
            lower_bound_bytes,
            zero3_offload_bytes,
            micro_batches,
        )

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

    def __str__(self) -> str:
        lines = [f"swaps of one step, {self.micro_batches} micro-batches          to device         to host"]
        lines += [
            f"  {kind:<36}{self.host_to_device[kind]:>17,}{self.device_to_host[kind]:>16,}"
            for kind in self.host_to_device
        ]
        lines.append(f"  weights and gradients {self.swap_bytes:,} bytes = {self.ratio:.4f} x the lower bound")
        if self.swap_bytes:
            saved = self.zero3_offload_bytes / self.swap_bytes
            lines.append(f"  ZeRO-3 offload would move {self.zero3_offload_bytes:,} bytes, {saved:.1f} x as much")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes on the device and on the host.

    Attributes:
        device_peak_bytes: the most in use during the last step.
        planned_peak_bytes: what the plan predicted.
        budget_bytes: the limit (None: unlimited).
        host_bytes: by kind: "weights", "masters", "optimizer", "gradients", "stash".
        counted: "allocator" where activations are counted as they are allocated, "plan" where they are charged as
            measured per layer (the CPU device).
    """

    device_peak_bytes: int
    planned_peak_bytes: int
    budget_bytes: int | None
    host_bytes: dict[str, int]
    counted: str

    def __str__(self) -> str:
        budget = "unlimited" if self.budget_bytes is None else f"{self.budget_bytes:,}"
        host = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in self.host_bytes.items())
        return (
            f"device peak {self.device_peak_bytes:,} bytes ({self.counted}), planned {self.planned_peak_bytes:,}, "
            f"budget {budget}\nhost {sum(self.host_bytes.values()):,} bytes: {host}"
        )
