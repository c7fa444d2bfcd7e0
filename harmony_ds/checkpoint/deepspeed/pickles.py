"""Reads the pickles that DeepSpeed's checkpoints are made of, without executing any.

torch's restricted unpickler makes tensors and plain containers. The few classes of DeepSpeed that its files name become
inert records here: their code is neither run nor imported. Whatever else a file names is refused by that name.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch

from harmony_ds.errors import CheckpointError


class Record:
    """The attributes of an object whose class is not wanted."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def _number(value: int) -> int:
    return value


_INERT: list[Any] = [
    (Record, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Record, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Record, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def load_pickle(path: Path) -> Any:
    """The content of a file of `torch.save`; its tensors are mapped from the file.

    Raises:
        CheckpointError: it is missing or torn, or holds something that is not on the list.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        with torch.serialization.safe_globals(_INERT):
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)  # as torch wrote before version 1.6
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))  # the rest of torch's message advises to execute it
        if named is None:
            raise CheckpointError(f"{path} is no whole file of torch.save.") from error
        raise CheckpointError(
            f"{path} holds an object of {named[1]}, which is not executed here. Allowed are tensors, plain data and what "
            "DeepSpeed itself saves: put such objects into the client state as plain data, or save without them."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no whole file of torch.save: {error}") from error
