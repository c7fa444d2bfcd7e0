"""What is on the device and on the host at once, of which one side may be newer than the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from harmony_ds.offload.device_optimizer import DeviceOptimizer
from harmony_ds.offload.host_store import ungated


class Twin(ABC):
    """Something on both sides. At most one of them is newer than the other.

    Attributes:
        dirty: the device's is newer.
        shown: somebody may have written into the host's.
    """

    def __init__(self, shown: bool = False) -> None:
        self.dirty = False
        self.shown = shown

    def to_host(self, read_only: bool = False) -> int:
        """Issues the copy to the host, if the device's is newer; returns the bytes it moves.

        Args:
            read_only: who asks will not write into it, so that the device's copy stays good.
        """
        self.shown = self.shown or not read_only
        if not self.dirty:
            return 0
        self.dirty = False
        return self._copy_to_host()

    def to_device(self) -> int:
        """Issues the copy to the device, if the host's may have changed; returns the bytes it moves."""
        if not self.shown and not self._was_written():
            return 0
        self.shown = self.dirty = False
        return self._copy_to_device()

    def stepped(self) -> None:
        """The device's was written."""
        self.dirty, self.shown = True, False

    def replaced(self) -> None:
        """The host's is another one."""
        self.dirty, self.shown = False, True

    @abstractmethod
    def _was_written(self) -> bool: ...

    @abstractmethod
    def _copy_to_host(self) -> int: ...

    @abstractmethod
    def _copy_to_device(self) -> int: ...


class TensorTwin(Twin):
    """A weight or a master."""

    def __init__(self, host: Tensor, device: Tensor) -> None:
        super().__init__()
        self.host = host
        self.device = device
        with ungated():
            self._version = host._version

    def _was_written(self) -> bool:
        with ungated():
            return self.host._version != self._version

    def _copy_to_host(self) -> int:
        with ungated():
            self.host.data.copy_(self.device, non_blocking=True)
            self._version = self.host._version
        return self.device.numel() * self.device.element_size()

    def _copy_to_device(self) -> int:
        with ungated():
            self._version = self.host._version
            self.device.copy_(self.host, non_blocking=True)
        return self.device.numel() * self.device.element_size()


class StateTwin(Twin):
    """The optimizer state of the parameter `name`, which the device's optimizer steps as `parameter`."""

    def __init__(self, name: str, parameter: nn.Parameter, optimizer: DeviceOptimizer) -> None:
        super().__init__(shown=True)
        self.name = name
        self.parameter = parameter
        self._optimizer = optimizer

    def newer(self) -> dict[str, Any] | None:
        """The device's tensors under the host's keys; None if the host's are true."""
        return self._optimizer.state_as_on_host(self.name, self.parameter) if self.dirty else None

    def _was_written(self) -> bool:
        return False

    def _copy_to_host(self) -> int:
        return self._optimizer.copy_state_to_host(self.name, self.parameter)

    def _copy_to_device(self) -> int:
        return self._optimizer.copy_state_to_device(self.name, self.parameter)


@dataclass(slots=True, eq=False)
class HeldParameter:
    """One parameter on the device.

    Attributes:
        weight: what layers compute with.
        master: beside it, if the weight is not its own master and the parameter is trained.
        state: the optimizer's, if the parameter is trained.
        state_bytes: what that takes.
    """

    weight: TensorTwin
    master: TensorTwin | None = None
    state: StateTwin | None = None
    state_bytes: int = 0

    @property
    def tensors(self) -> list[TensorTwin]:
        return [self.weight] if self.master is None else [self.weight, self.master]

    @property
    def twins(self) -> list[Twin]:
        return [*self.tensors] if self.state is None else [*self.tensors, self.state]
