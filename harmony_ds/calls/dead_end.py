"""Where graphs end that are thrown away, so that a gradient which would be lost is an error."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from harmony_ds.errors import ModelError

_GUARD = "_harmony_guard"


class DeadEnd:
    """Where the graph of a forward pass ends that is thrown away: a gradient that comes here came by a way of its own."""

    def __init__(self, layer: str) -> None:
        self.layer = layer

    def add(self, gradient: Tensor) -> None:
        raise ModelError(
            f"a gradient reaches layer {self.layer} by a tensor that left it neither as a result nor in an argument or "
            "an attribute of a module (a hook, a closure or a global variable holds it), and would be lost: the graph of "
            "a layer lives only while the layer runs. Let the layer return that tensor, or detach it."
        )

    def take(self) -> Tensor | None:
        return None

    def guarded(self, copies: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Aliases of `copies` (each made once) for a forward pass whose graph is thrown away."""
        return {name: self._guard(copy) for name, copy in copies.items()}

    def _guard(self, copy: Tensor) -> Tensor:
        known: Tensor | None = getattr(copy, _GUARD, None)
        if known is not None:
            return known
        alias = nn.Parameter(copy.detach(), requires_grad=copy.requires_grad)
        if copy.requires_grad:
            alias.register_hook(self.add)
        setattr(copy, _GUARD, alias)
        return alias
