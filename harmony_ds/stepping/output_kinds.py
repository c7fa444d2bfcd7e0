"""What a model returns, by the form of its call: whether its loss can stay pending."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from harmony_ds.errors import BatchError
from harmony_ds.runtime.micro_batch import loss_of
from harmony_ds.stepping.pending_output import OutputForm


@dataclass(frozen=True, slots=True)
class OutputKind:
    """What calls of one form (these keyword arguments and switches among them, that many positional ones) return.

    Attributes:
        pending: whether the loss can stay pending: there is a scalar loss among the outputs.
        bare: whether the output is that scalar itself.
        dtype: of the loss.
        form: of outputs that hold a loss and can wait for it.
    """

    pending: bool
    bare: bool
    dtype: torch.dtype
    form: OutputForm | None = None


class OutputKinds:
    """Learns what a model returns, from the first time each form of call is measured."""

    def __init__(self) -> None:
        self._known: dict[object, OutputKind] = {}

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputKind | None:
        return self._known.get(self._form(args, kwargs))

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """A call of these arguments returned `outputs`."""
        try:
            loss = loss_of(outputs)
            bare = outputs is loss
            # A tuple may be unpacked at once, so it cannot stay pending.
            form = None if bare else OutputForm.of(outputs, loss)
            kind = OutputKind(bare or form is not None, bare, loss.dtype, form)
        except BatchError:
            kind = OutputKind(False, False, torch.float32)
        self._known[self._form(args, kwargs)] = kind

    @staticmethod
    def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        switches = {key: value for key, value in kwargs.items() if isinstance(value, bool)}
        return (
            len(args),
            frozenset(key for key, value in kwargs.items() if value is not None),
            frozenset(switches.items()),
        )
