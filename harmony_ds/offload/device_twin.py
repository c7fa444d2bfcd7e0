"""One tensor on the device and on the host, of which one may be ahead of the other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from harmony_ds.offload.host_store import ungated


class Twin:
    """One tensor on both sides. At most one of them is ahead of the other."""

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self.host = host
        self.device = device
        self.ahead = False  # the device's is newer
        self.shown = False  # somebody may have written into the host's
        with ungated():
            self._version = host._version

    def to_host(self, read_only: bool = False) -> int:
        """Issues the copy to the host, if that lags behind; returns the bytes it moves.

        Args:
            read_only: who asks will not write into it, so that the device's copy stays good.
        """
        self.shown = self.shown or not read_only
        if not self.ahead:
            return 0
        self.ahead = False
        with ungated():
            self.host.data.copy_(self.device, non_blocking=True)
            self._version = self.host._version
        return self.device.numel() * self.device.element_size()

    def to_device(self) -> int:
        """Issues the copy to the device, if the host's may have changed; returns the bytes it moves."""
        with ungated():
            if not self.shown and self.host._version == self._version:
                return 0
            self.shown = self.ahead = False
            self._version = self.host._version
            self.device.copy_(self.host, non_blocking=True)
        return self.device.numel() * self.device.element_size()


@dataclass(slots=True, eq=False)
class HeldParameter:
    """One parameter on the device.

    Attributes:
        weight: what layers compute with.
        master: beside it, if the weight is not its own master and the parameter is trained.
        stepped: what the optimizer steps: the master, or the weight; None if it is not trained.
        state_bytes: what its optimizer state takes.
        state_ahead, state_shown: as those of a twin.
    """

    weight: Twin
    master: Twin | None = None
    stepped: nn.Parameter | None = None
    state_bytes: int = 0
    state_ahead: bool = False
    state_shown: bool = False
