"""The gradients of a step between its runs, on the device, on the host, or on the program's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from harmony_ds.offload.device_copies import DeviceCopy
from harmony_ds.runtime.runtime import Runtime


class AccumulatedGradients:
    """The gradients of a step so far, which wait for their update on the host or, those of resident packs, on the device.

    A step may run in parts; between them the program may read, change and discard these gradients. The argument `unlayered`
    is the device copy of the parameters that no layer has, while it is on the device.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._moved_to_host = False  # whether gradients of resident packs have been moved to the host in this step

    def collect_user_gradients(self, names: tuple[str, ...]) -> bool:
        """Hand the updater what the user's own backward passes left on `.grad` of `names`; return whether there was any."""
        runtime = self._runtime
        own = runtime.user_gradients.pop(names)
        if not own:
            return False
        runtime.world.refuse(f"a loss with {min(own)} in it outside the model's forward (a temperature, a penalty)")
        # Clones: the program may write into its tensors right after the step.
        clones = {name: gradient.clone() for name, gradient in own.items()}
        runtime.updater.deposit(runtime.host_gradients.wrap(clones))
        return True

    def to_host(self) -> None:
        """Move the gradients of resident packs to the host, before the packs leave the device."""
        runtime = self._runtime
        gradients = runtime.resident_packs.pop_all()
        if gradients:
            runtime.updater.deposit(runtime.host_gradients.wrap(gradients))
            runtime.updater.compute_norms(tuple(gradients))
            self._moved_to_host = True

    def move_back(self, names: tuple[str, ...]) -> None:
        """Move gradients of `names`, parameters of a resident pack, back to the device if they were moved to the host."""
        if self._moved_to_host:
            for name, gradient in self._runtime.updater.pop_gradients(names).items():
                self._runtime.resident_packs.add_gradient(name, gradient)

    def to_device(self, names: tuple[str, ...]) -> None:
        """Add gradients of `names`, parameters of a resident pack, that are on the host to those on the device."""
        runtime = self._runtime
        self.move_back(names)
        for name, gradient in runtime.user_gradients.pop(names).items():
            runtime.resident_packs.add_gradient(name, gradient)

    def find(self, name: str, unlayered: Sequence[DeviceCopy]) -> Tensor | None:
        """Return the gradient of `name`: the tensor itself, on the device or the host; None: there is none."""
        runtime = self._runtime
        if self._moved_to_host and runtime.resident_packs.leaves((name,)):
            self.to_device((name,))
        for copy in unlayered:
            gradient = runtime.device_copies.gradient(copy, name)
            if gradient is not None:
                return gradient
        gradient = runtime.resident_packs.gradient(name)
        return runtime.updater.gradient(name) if gradient is None else gradient

    def discard(self, names: Iterable[str], unlayered: Sequence[DeviceCopy]) -> None:
        """Discard the gradients of `names`."""
        runtime = self._runtime
        runtime.host_gradients.received.difference_update(names)
        runtime.updater.discard_gradients(tuple(names))
        runtime.resident_packs.clear_gradients(names)
        for copy in unlayered:
            for name in names:
                runtime.device_copies.clear_gradient(copy, name)

    def note_gone(self) -> None:
        """Note that the gradients of the step are used or discarded."""
        self._moved_to_host = False
