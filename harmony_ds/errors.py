"""Every exception that harmony_ds raises of its own.

    HarmonyError
    ├── ConfigError (ValueError)            a ds_config that cannot be meant
    │   └── ContradictionError (AssertionError)  settings or arguments that contradict each other, or are missing
    ├── ArgumentError (TypeError)           an argument of initialize that is of another type
    ├── BatchError (ValueError)             a micro-batch that cannot be trained on
    │   ├── NotScalarError (AssertionError)  backward from what is no scalar loss
    │   └── UnscaledLossError (RuntimeError)  backward of the user's own from a loss that fp16 needs scaled
    ├── UsageError (AssertionError)         calls of the engine in an order that cannot be meant
    ├── UnsupportedError (NotImplementedError)  what DeepSpeed's engine can do and this one cannot
    ├── ModelError                          a model that cannot be decomposed, or that broke a promise while running
    │   ├── ParameterOutsideLayerError      a parameter used where no layer call has it on the device
    │   ├── CallChangedError                the model was changed between a call and its forward pass, which runs later
    │   └── RecomputeError                  a layer that does something else when it is run again
    ├── OptimizerError                      an optimizer that cannot be stepped layer by layer
    │   ├── NoOptimizerError (AssertionError)  backward or step without an optimizer
    │   └── CompilerMissingError            DeepSpeed's CPU optimizers need a C++ compiler and found none
    ├── CheckpointError                     a checkpoint that cannot be written, is torn or foreign, or does not fit
    ├── ProfileError                        a profile that cannot be read, is stale, or does not cover what is planned
    ├── DoesNotFitError (torch.OutOfMemoryError)  the device memory budget holds no plan, or not one layer; before a step
    ├── HostMemoryError                     host memory (or a container's share) does not hold the training state
    ├── DeviceOutOfMemoryError (torch.OutOfMemoryError)  the budget was exceeded while running
    ├── LossScaleError                      fp16 gradients overflow even at the smallest loss scale
    ├── EngineFailedError                   the engine was left half-updated by an earlier error and must be rebuilt
    ├── PeerFailedError                     another process of this training failed, or has ended
    └── ProcessesDifferError                processes of one training do, or were given, different things

Where DeepSpeed has an `assert`, ours is an AssertionError too, so that what catches its errors catches these.
Errors of the user's own code (a layer, a loss, an optimizer, Ctrl-C) are never wrapped: they surface as themselves.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


class HarmonyError(Exception):
    """Base of all of them."""


class ConfigError(HarmonyError, ValueError):
    """The ds_config has a key or value that cannot be meant.

    Where deepspeed is loaded, what is raised is a `deepspeed.DeepSpeedConfigError` too.
    """

    def __new__(cls, *args: object) -> ConfigError:
        """`cls`, or in a process that has DeepSpeed, a class that is DeepSpeed's too."""
        theirs = getattr(sys.modules.get("deepspeed"), "DeepSpeedConfigError", None)
        kind: type[ConfigError] = cls if theirs is None or issubclass(cls, theirs) else _both(cls, theirs)
        return super().__new__(kind, *args)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[object, ...]]:
        return getattr(type(self), "_ours", type(self)), self.args


class ContradictionError(ConfigError, AssertionError):
    """Settings or arguments contradict each other, or something that is needed was left out."""


class ArgumentError(HarmonyError, TypeError):
    """An argument of `initialize` is of another type than it takes."""


class BatchError(HarmonyError, ValueError):
    """A micro-batch holds no tensor, or the model returned no loss for it."""


class NotScalarError(BatchError, AssertionError):
    """What is to be propagated back from is not a scalar tensor."""


class UnscaledLossError(BatchError, RuntimeError):
    """With fp16, `backward()` was called on a loss that neither `engine.backward` nor `engine.scale` has scaled."""


class UsageError(HarmonyError, AssertionError):
    """A method of the engine was called where its state does not allow it."""


class UnsupportedError(HarmonyError, NotImplementedError):
    """DeepSpeed's engine can do this, and this one cannot."""


class ModelError(HarmonyError):
    """The model cannot be decomposed into layers, or broke a promise that its layers gave."""


class ParameterOutsideLayerError(ModelError):
    """A parameter was used where no layer call has it on the device."""


class CallChangedError(ModelError):
    """The model was changed while micro-batches that were called before wait for their forward pass."""


class RecomputeError(ModelError):
    """A layer that is run again on what it was given gives something else, by state that cannot be seen from outside."""


class OptimizerError(HarmonyError):
    """The optimizer cannot be stepped layer by layer on the host."""


class NoOptimizerError(OptimizerError, AssertionError):
    """The engine was built without an optimizer, and cannot train."""


class CompilerMissingError(OptimizerError):
    """DeepSpeed's CPU optimizers are compiled on first use and no working C++ compiler was found."""


class CheckpointError(HarmonyError):
    """A checkpoint cannot be written or read, is torn or foreign, or is of another model or optimizer."""


class ProfileError(HarmonyError):
    """A profile cannot be read, was measured on something else, or does not cover what is to be planned."""


def _known_to_accelerate(message: str) -> str:
    """`message` with the words by which accelerate's `find_executable_batch_size` knows that a smaller batch may fit."""
    return message if " out of memory." in message else f"{message.rstrip('.')}. The device would run out of memory."


class DoesNotFitError(HarmonyError, torch.OutOfMemoryError):
    """No plan fits the device memory budget, or the model cannot even be measured in it: raised before a step runs.

    Nothing has been changed, and the engine holds nothing on the device but the model's buffers: a smaller micro-batch can
    be trained on, or the engine destroyed and another one built. Where memory ran out while a model was measured, that
    error (a torch.OutOfMemoryError, as this one is for loops that split what is too large) is its `__cause__`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_known_to_accelerate(message))


class HostMemoryError(HarmonyError):
    """Host memory, or what a container may have of it, does not hold weights, masters and optimizer state."""


class DeviceOutOfMemoryError(HarmonyError, torch.OutOfMemoryError):
    """The device memory budget was exceeded while running: by a step that takes more than it was measured to take."""

    def __init__(self, message: str) -> None:
        super().__init__(_known_to_accelerate(message))


class LossScaleError(HarmonyError):
    """Gradients overflow in fp16 although the loss scale is at its minimum."""


class EngineFailedError(HarmonyError):
    """An earlier error left some layers updated and others not; the engine must be rebuilt from a checkpoint."""


class PeerFailedError(HarmonyError):
    """Another process of this training failed, ended, or cannot be reached.

    Attributes:
        rank: of that process.
        message: what it said, or what was seen of it.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(rank, message)
        self.rank = rank
        self.message = message

    def __str__(self) -> str:
        return f"rank {self.rank} of this training failed: {self.message}"

    def __repr__(self) -> str:
        return f"PeerFailedError({self})"  # others quote it, and name the rank that was the first


class ProcessesDifferError(HarmonyError):
    """The processes of one training do different things, or were given different models, settings or data."""


def _both(cls: Any, theirs: type[Exception]) -> Any:
    return type(cls.__name__, (cls, theirs), {"__module__": cls.__module__, "_ours": cls})
