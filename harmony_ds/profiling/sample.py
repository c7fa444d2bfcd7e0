"""A micro-batch to measure a model with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harmony_ds.model.intercept import Autocast
from harmony_ds.model.own_settings import is_switch
from harmony_ds.model.trees import flatten, map_tensors, tensors_in
from harmony_ds.runtime.micro_batch import Objective

InputShapes = tuple[tuple[int, ...], ...]
"""Shape of each tensor among the arguments of a forward pass."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A micro-batch to measure a model with.

    Attributes:
        inputs: arguments of the model's forward.
        call: runs the forward pass with such arguments.
        surrogate_loss: from the outputs, what is propagated back from: the loss, or what takes about as long.
        seed: of its random numbers.
        modes: the model's training and requires_grad flags, and its settings, packed.
        inputs_form: what else decides which operations the model runs, see `form_of_inputs`.
        trains: whether such micro-batches are propagated back from.
        inputs_beside: those of other forward passes that share its loss.
        in_groups: whether matrices with several times its rows hold as many for each of them (passages of each query).
    """

    inputs: Any
    call: Callable[[Any], Any]
    surrogate_loss: Objective
    seed: int
    modes: bytes = b""
    inputs_form: str = ""
    trains: bool = True
    inputs_beside: Any = ()
    in_groups: bool = False

    @property
    def form(self) -> object:
        """What decides which operations the model runs."""
        return self.modes, self.inputs_form

    @property
    def rows(self) -> int:
        """Length of its first tensor."""
        return next((t.shape[0] for t in tensors_in(self.inputs) if t.dim()), 1)

    def few(self, rows: int) -> Sample:
        """Return the first `rows` rows of each tensor that has as many as the first one, repeated if there are fewer.

        Repeated rows are rolled along their first dimension, but for masks: of equal rows every mean and order is the same.
        """
        total = self.rows

        def some(tensor: Tensor) -> Tensor:
            count = self._rows_for_each(tensor, total)
            if not count:
                return tensor
            has, wanted = total * count, rows * count
            if wanted <= has or tensor.dim() < 2 or _is_mask(tensor):
                return tensor[torch.arange(wanted, device=tensor.device) % has]
            return torch.stack([tensor[row % has].roll(row // has, 0) for row in range(wanted)])

        return replace(self, inputs=map_tensors(some, self.inputs))

    def _rows_for_each(self, tensor: Tensor, total: int) -> int:
        """Return how many rows of `tensor` are for each of the `total` rows; 0: it does not hold rows."""
        if not tensor.dim() or not total or not tensor.shape[0] or tensor.shape[0] % total:
            return 0
        count = tensor.shape[0] // total
        return count if count == 1 or (self.in_groups and tensor.dim() > 1) else 0

    def readings(self) -> list[Sample]:
        """Return the sample with larger matrices in groups of rows, if it may have some; then with its own rows alone."""
        total, grouped = self.rows, replace(self, in_groups=True)
        may_have = total > 1 and any(grouped._rows_for_each(tensor, total) > 1 for tensor in tensors_in(self.inputs))
        return [grouped, self] if may_have else [self]

    def masked_alike(self) -> list[Sample]:
        """Return the sample with masks that hide the end of each row, and with masks that hide nothing; or just itself.

        A model may take rows through its layers without a mask where nothing is hidden.
        """

        def masked(tensor: Tensor, hides: bool) -> Tensor:
            mask = torch.ones_like(tensor) if _is_mask(tensor) else tensor
            if mask is not tensor and hides:
                mask[..., -1] = 0
            return mask

        both = [replace(self, inputs=map_tensors(partial(masked, hides=h), self.inputs)) for h in (True, False)]
        return both if any(map(_is_mask, tensors_in(self.inputs))) else [self]


def _is_mask(tensor: Tensor) -> bool:
    """Whether a tensor may be a mask: its largest element is 1."""
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta)
    return whole and tensor.dim() > 1 and tensor.numel() > 0 and tensor.max().item() == 1


def form_of_inputs(inputs: Any, autocast: Autocast | None) -> str:
    """Return what of a call, beside shapes, decides which operations the model runs: autocast, dtypes, flags, zeros.

    Words are not in it: some are data (the name of a run).
    """
    form: list[object] = [autocast] if autocast is not None and autocast.enabled else []
    leaves, _ = flatten((inputs,))
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            form.append((place, leaf.dtype))
        elif is_switch(leaf) and not isinstance(leaf, str):
            form.append((place, leaf))
    return repr(form)


def shapes_of(inputs: Any) -> InputShapes:
    """Return the shape of each tensor in `inputs`."""
    return tuple(tuple(t.shape) for t in tensors_in(inputs))
