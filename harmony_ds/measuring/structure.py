"""When two layer calls take the same: same class, same parameters, same arguments, in shape and dtype."""

from __future__ import annotations

from harmony_ds.calls.intercept import Request
from harmony_ds.calls.trees import tensors_in
from harmony_ds.decomposer.find import Layer

Structure = tuple[object, ...]


def structure_of(layer: Layer, request: Request) -> Structure:
    """What the calls of equal layers have in common."""
    parameters = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in layer.module.parameters())
    arguments = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_in((request.args, request.kwargs)))
    return (type(layer.module), parameters, arguments)
