"""Every exception that harmony_ds raises of its own.

    HarmonyError
    ├── ConfigError (ValueError)            a ds_config that cannot be meant
    ├── BatchError (ValueError)             a micro-batch that cannot be trained on
    ├── ModelError                          a model that cannot be decomposed, or that broke a promise while running
    │   └── ParameterOutsideLayerError      a parameter used where no layer call has it on the device
    ├── OptimizerError                      an optimizer that cannot be stepped layer by layer
    │   └── CompilerMissingError            DeepSpeed's CPU optimizers need a C++ compiler and found none
    ├── CheckpointError                     a checkpoint that cannot be written, is torn or foreign, or does not fit
    ├── ProfileError                        a profile that cannot be read, is stale, or does not cover what is planned
    ├── DoesNotFitError                     no plan fits the device memory budget; raised before training starts
    ├── DeviceOutOfMemoryError              the budget was exceeded while running (also a torch.OutOfMemoryError)
    ├── LossScaleError                      fp16 gradients overflow even at the smallest loss scale
    └── EngineFailedError                   the engine was left half-updated by an earlier error and must be rebuilt

Errors of the user's own code (a layer, a loss, an optimizer, Ctrl-C) are never wrapped: they surface as themselves.
"""

from __future__ import annotations

import torch


class HarmonyError(Exception):
    """Base of all of them."""


class ConfigError(HarmonyError, ValueError):
    """The ds_config has a key or value that cannot be meant."""


class BatchError(HarmonyError, ValueError):
    """A micro-batch holds no tensor, or the model returned no loss for it."""


class ModelError(HarmonyError):
    """The model cannot be decomposed into layers, or broke a promise that its layers gave."""


class ParameterOutsideLayerError(ModelError):
    """A parameter was used where no layer call has it on the device."""


class OptimizerError(HarmonyError):
    """The optimizer cannot be stepped layer by layer on the host."""


class CompilerMissingError(OptimizerError):
    """DeepSpeed's CPU optimizers are compiled on first use and no working C++ compiler was found."""


class CheckpointError(HarmonyError):
    """A checkpoint cannot be written or read, is torn or foreign, or is of another model or optimizer."""


class ProfileError(HarmonyError):
    """A profile cannot be read, was measured on something else, or does not cover what is to be planned."""


class DoesNotFitError(HarmonyError):
    """No plan fits the device memory budget."""


class DeviceOutOfMemoryError(HarmonyError, torch.OutOfMemoryError):
    """The device memory budget was exceeded while running."""


class LossScaleError(HarmonyError):
    """Gradients overflow in fp16 although the loss scale is at its minimum."""


class EngineFailedError(HarmonyError):
    """An earlier error left some layers updated and others not; the engine must be rebuilt from a checkpoint."""
