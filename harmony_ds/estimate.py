"""A `Profile` without the machine: the engine's own measuring, on a device that does not exist.

The model and its inputs are on torch's meta device, so nothing is allocated or computed. Layers are found, intercepted
and cut by the same code that trains; bytes are counted as the CPU device counts them; times are a roofline model's
(`profiler.roofline`). What depends on values (how many tokens an expert gets) cannot be known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from harmony_ds.assembly import Assembly, assemble
from harmony_ds.config import Config
from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.device.meta import MetaDevice
from harmony_ds.errors import ModelError, ParameterOutsideLayerError
from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.hardware import Hardware, UpdateCost
from harmony_ds.profiler.profile import Profile
from harmony_ds.profiler.roofline import Kernels, on_meta
from harmony_ds.runtime.layer_call import InputChangedError
from harmony_ds.runtime.measure import Measurement
from harmony_ds.runtime.micro_batch import loss_of
from harmony_ds.runtime.timing import Timing

_ATTEMPTS = 16
_STATES = {"adam": 2, "adamw": 2, "adagrad": 1, "lion": 1, "sgd": 0}
"""fp32 numbers per parameter; other optimizers are taken for Adam-like."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of a model on a machine before either has done anything.

    Attributes:
        graph: layers, parameters and the call order.
        profile: costs of the given micro-batch on the given machine.
        buffer_bytes: of the model's buffers, which stay on the device.
    """

    graph: LayerGraph
    profile: Profile
    buffer_bytes: int


def estimate(
    model: nn.Module, inputs: Mapping[str, Any], config: Config, hardware: Hardware, kernels: Kernels = Kernels.CUDA
) -> Estimate:
    """The profile of one micro-batch of `inputs`.

    Args:
        model: on the meta device, in the mode (training) that is meant; it is left as it was, in the compute dtype.
        inputs: keyword arguments of its forward, on the meta device; the model must return a loss for them.

    Raises:
        ModelError: the model cannot be decomposed, or decides by values what it runs.
    """
    with on_meta(hardware.kernels(), kernels) as clock:
        device = MetaDevice(lambda: clock.ms)
        # No optimizer is built: nothing is updated, and DeepSpeed's would have to be compiled.
        assembly = assemble(model, replace(config, optimizer=None), None, None, device)
        try:
            graph, table = _measured(assembly, lambda: model(**inputs))
            buffers = assembly.parts.lending.buffer_bytes
        finally:
            assembly.destroy()
    rows = config.micro_batch
    profile = Profile(hardware.machine(update_cost(config)), ((rows, table),), _key(model, hardware, config))
    return Estimate(graph, profile, buffers)


def update_cost(config: Config) -> UpdateCost:
    """What the configured optimizer moves in host memory per parameter."""
    name = "adam" if config.optimizer is None else config.optimizer.type.lower()
    states = _STATES.get(name, 2)
    if name == "sgd" and config.optimizer is not None and config.optimizer.params.get("momentum"):
        states = 1
    mixed = config.compute_dtype != torch.float32
    return UpdateCost(states, config.accumulation_dtype.itemsize, config.compute_dtype.itemsize if mixed else 0)


def _measured(assembly: Assembly, forward: Callable[[], Any]) -> tuple[LayerGraph, CostTable]:
    """Bytes, then times; parameters that turn out to be used between layers join the resident set."""
    parts, graph = assembly.parts, assembly.runner.graph
    layers = assembly.layers
    tools = (parts.device, layers, parts.residency, parts.lending, parts.layer_calls, parts.random)
    for _ in range(_ATTEMPTS):
        try:
            table = Measurement(*tools).run(forward, loss_of, 0, graph.resident, share_equal=True)
            table = Timing(*tools).run(table, forward, loss_of, 0, graph.resident)
            return replace(graph, calls=table.calls), table
        except ParameterOutsideLayerError:
            found = parts.lending.touched - set(graph.resident)
            if not found:
                raise
            graph = replace(graph, resident=(*graph.resident, *sorted(found)))
        except InputChangedError:
            pass  # it is remembered; the next run keeps a copy
        except (NotImplementedError, RuntimeError) as error:
            raise ModelError(f"the model does not run on the meta device ({error}): profile it with data.") from error
    raise AssertionError("the model shows something new each time it is measured")


def _key(model: nn.Module, hardware: Hardware, config: Config) -> dict[str, str]:
    return {
        "source": "estimate",
        "model": type(model).__name__,
        "parameters": str(sum(p.numel() for p in model.parameters())),
        "machine": hardware.name,
        "dtype": str(config.compute_dtype),
        "torch": torch.__version__,
    }
