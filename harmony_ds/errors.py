"""Every exception that harmony_ds raises of its own.

    HarmonyError
    ├── ConfigError (ValueError, AssertionError)  a ds_config or argument that is wrong, contradicts another or is missing
    ├── BatchError (ValueError)             a micro-batch that cannot be trained on
    ├── UsageError (AssertionError, RuntimeError)  calls of the engine that its state does not allow
    ├── UnsupportedError (NotImplementedError)  DeepSpeed's engine can do this, and this one cannot
    ├── ModelError                          a model that cannot be decomposed, or that breaks the contract while running
    ├── OptimizerError (ValueError, AssertionError)  an optimizer that cannot be built, or not be stepped layer by layer
    ├── CheckpointError (RuntimeError)      a checkpoint that cannot be written, is torn or foreign, or does not fit
    ├── ProfileError                        a profile that cannot be read, is stale, or does not cover what is planned
    ├── DoesNotFitError (OutOfMemoryError)  the device memory budget holds no plan, or not one layer; before a step
    ├── HostMemoryError                     host memory (or a container's share) does not hold the training state
    ├── EngineFailedError                   training cannot go on: updated by half, or overflows at the smallest loss scale
    └── PeerFailedError                     another process of this training failed, or has ended

Where DeepSpeed has an `assert`, ours is an AssertionError too, and where torch raises under DeepSpeed (a state dict that
does not fit, an optimizer without parameters), ours is of torch's class: what catches those errors catches these.
Memory that runs out during a step is torch's own OutOfMemoryError, on either device. Errors of the user's own code (a
layer, a loss, an optimizer, Ctrl-C) are never wrapped: they surface as themselves.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


class HarmonyError(Exception):
    """Base of every exception that harmony_ds raises of its own."""


class ConfigError(HarmonyError, ValueError, AssertionError):
    """A key of the ds_config or an argument of `initialize` is wrong, contradicts another one, or was left out.

    Once deepspeed is imported, the error raised is a `deepspeed.DeepSpeedConfigError` too.
    """

    def __new__(cls, *args: object) -> ConfigError:
        """Return an error of `cls`, or in a process that has imported deepspeed, of a class that is deepspeed's too."""
        theirs = getattr(sys.modules.get("deepspeed"), "DeepSpeedConfigError", None)
        kind: type[ConfigError] = cls if theirs is None or issubclass(cls, theirs) else _both(cls, theirs)
        return super().__new__(kind, *args)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[object, ...]]:
        return getattr(type(self), "_ours", type(self)), self.args


class BatchError(HarmonyError, ValueError):
    """A micro-batch holds no tensor, or the model returned no loss for it."""


class UsageError(HarmonyError, AssertionError, RuntimeError):
    """The state of the engine does not allow this call, or another process of the training does something else."""


class UnsupportedError(HarmonyError, NotImplementedError):
    """DeepSpeed's engine can do this, and this one cannot."""


class ModelError(HarmonyError):
    """The model cannot be decomposed into layers, or breaks the contract (docs/contract.md) while running."""


class OptimizerError(HarmonyError, ValueError, AssertionError):
    """The optimizer cannot be stepped layer by layer on the host, or its C++ code cannot be compiled here."""


class CheckpointError(HarmonyError, RuntimeError):
    """A checkpoint cannot be written or read, is torn or foreign, or is of another model or optimizer."""


class ProfileError(HarmonyError):
    """A profile cannot be read, was measured on something else, or does not cover what is to be planned."""


class DoesNotFitError(HarmonyError, torch.OutOfMemoryError):
    """No plan fits the device memory budget, or the model cannot even be measured in it: raised before a step runs.

    Nothing has been changed, and the engine holds nothing on the device but the model's buffers: train on a smaller
    micro-batch, or destroy the engine and build another one. If memory ran out while the model was measured, that error is
    the `__cause__`. It is a torch.OutOfMemoryError for loops that split a batch that is too large.

    Attributes:
        least_budget_bytes: the device memory budget that would do for the smallest plan that was tried; None: not known.
    """

    def __init__(self, message: str, least_budget_bytes: int | None = None) -> None:
        # accelerate's `find_executable_batch_size` knows by these words that a smaller batch may fit.
        known = (
            message if " out of memory." in message else f"{message.rstrip('.')}. The device would run out of memory."
        )
        super().__init__(known)
        self.least_budget_bytes = least_budget_bytes


class HostMemoryError(HarmonyError):
    """Host memory, or a container's share of it, does not hold weights, masters and optimizer state."""


class EngineFailedError(HarmonyError):
    """Training cannot go on: an earlier error left some layers updated and others not, or fp16 gradients overflow at the
    smallest loss scale. Build a new engine from a checkpoint.
    """


class PeerFailedError(HarmonyError):
    """Another process of this training failed, ended, or cannot be reached.

    Attributes:
        rank: of that process.
        message: its error, or what was seen of its end.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(rank, message)
        self.rank = rank
        self.message = message

    def __str__(self) -> str:
        return f"rank {self.rank} of this training failed: {self.message}"

    def __repr__(self) -> str:
        return f"PeerFailedError({self})"  # others quote it, and name the rank that was the first


def _both(cls: Any, theirs: type[Exception]) -> Any:
    return type(cls.__name__, (cls, theirs), {"__module__": cls.__module__, "_ours": cls})
