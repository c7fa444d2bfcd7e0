"""A model on a machine, before it is trained: its layers, what they cost, and what a plan is wanted for.

`measure` runs one micro-batch on the device. `estimate` does the same on a device that does not exist: model and inputs
are on torch's meta device, so that nothing is allocated or computed, and a clock says what a described machine would
take (`profiler.roofline`). Layers are found, intercepted and cut by the code that trains, in both. What depends on
values (how many tokens an expert gets) cannot be estimated.
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
from harmony_ds.errors import ModelError, ProfileError
from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.hardware import Hardware, KernelRates, UpdateCost
from harmony_ds.profiler.profile import Machine, Profile
from harmony_ds.profiler.roofline import Kernels, on_meta
from harmony_ds.runtime.micro_batch import loss_of
from harmony_ds.runtime.observe import observe
from harmony_ds.runtime.rates import measure_rates
from harmony_ds.runtime.timing import Timing
from harmony_ds.scheduler.choose import Request
from harmony_ds.scheduler.packing import ElementBytes

_STATES = {"adam": 2, "adamw": 2, "adagrad": 1, "lion": 1, "sgd": 0}
"""fp32 numbers per parameter; other optimizers are taken for Adam-like."""
_MODEL_KEYS = ("model", "shapes", "dtypes", "torch")
_NO_RATES = KernelRates(1.0, 1.0, 1.0, 1.0, 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known of a model on a machine.

    Attributes:
        graph: layers, parameters and the call order.
        profile: costs of the configured micro-batch, and the machine's rates.
        element: bytes per element on the link.
        request: what the ds_config asks of a plan.
    """

    graph: LayerGraph
    profile: Profile
    element: ElementBytes
    request: Request

    @property
    def costs(self) -> CostTable:
        """Of the configured micro-batch."""
        return self.profile.tables[-1][1]


def estimate(
    model: nn.Module, inputs: Mapping[str, Any], config: Config, hardware: Hardware, kernels: Kernels = Kernels.CUDA
) -> Survey:
    """The survey of a machine that is only described.

    Args:
        model: on the meta device, in the mode (training) that is meant; its parameters are left in the compute dtype.
        inputs: keyword arguments of its forward, on the meta device; the model must return a loss for them.

    Raises:
        ModelError: the model cannot be decomposed, or not run without data.
    """
    machine = hardware.machine(update_cost(config))
    survey = _on_meta(model, inputs, config, hardware.kernels(), kernels, machine)
    budget = config.harmony.budget_bytes or hardware.device_budget_bytes
    return replace(survey, request=replace(survey.request, budget_bytes=budget))


def measure(model: nn.Module, inputs: Mapping[str, Any], config: Config) -> Survey:
    """The survey of this machine, with one micro-batch of `inputs` (keyword arguments, on the host).

    Raises:
        ModelError: the model cannot be decomposed.
        BaseException: whatever the model raised.
    """
    assembly = assemble(model, config, None, None, None)
    parts = assembly.parts
    try:
        moved = {key: parts.device.upload(v) if isinstance(v, torch.Tensor) else v for key, v in inputs.items()}
        seen = _see(assembly, inputs, lambda: model(**moved))
        machine = measure_rates(parts.device, parts.optimizer, config.compute_dtype, seen.swaps)
    finally:
        assembly.destroy()
    return _survey(assembly, config, seen, machine)


def with_profile(model: nn.Module, inputs: Mapping[str, Any], config: Config, profile: Profile) -> Survey:
    """The survey of a machine that was measured before, of which `profile` was saved.

    Args:
        model, inputs: on the meta device.

    Raises:
        ProfileError: `profile` is of another model, or of smaller micro-batches.
        ModelError: the model cannot be decomposed, or not run without data.
    """
    found = _on_meta(model, inputs, config, _NO_RATES, Kernels.CUDA, profile.machine)
    Profile(profile.machine, profile.tables, _of_model(profile)).check(_of_model(found.profile))
    if profile.calls != found.graph.calls:
        raise ProfileError("the profile's layers are called in another order than this model's: profile again.")
    costs = profile.at(config.micro_batch)
    budget = config.harmony.budget_bytes or profile.machine.device_bytes
    return replace(
        found,
        profile=replace(profile, tables=((config.micro_batch, costs),)),
        request=replace(found.request, budget_bytes=budget),
    )


def _of_model(profile: Profile) -> dict[str, str]:
    """The part of a profile's key that does not speak of the machine."""
    return {name: profile.key[name] for name in _MODEL_KEYS if name in profile.key}


def update_cost(config: Config) -> UpdateCost:
    """What the configured optimizer moves in host memory per parameter."""
    name = "adam" if config.optimizer is None else config.optimizer.type.lower()
    states = _STATES.get(name, 2)
    if name == "sgd" and config.optimizer is not None and config.optimizer.params.get("momentum"):
        states = 1
    mixed = config.compute_dtype != torch.float32
    return UpdateCost(states, config.accumulation_dtype.itemsize, config.compute_dtype.itemsize if mixed else 0)


def _on_meta(
    model: nn.Module,
    inputs: Mapping[str, Any],
    config: Config,
    rates: KernelRates,
    kernels: Kernels,
    machine: Machine,
) -> Survey:
    with on_meta(rates, kernels) as clock:
        assembly = assemble(model, _bare(config), None, None, MetaDevice(lambda: clock.ms))
        try:
            seen = _see(assembly, inputs, lambda: model(**inputs))
        except (NotImplementedError, RuntimeError) as error:
            raise ModelError(f"the model does not run on the meta device ({error}): profile it with data.") from error
        finally:
            assembly.destroy()
        return _survey(assembly, config, seen, machine)


def _bare(config: Config) -> Config:
    """Without an optimizer, since nothing is updated and DeepSpeed's would have to be compiled, and without files."""
    return replace(config, optimizer=None, harmony=replace(config.harmony, plan=None, profile=None))


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one micro-batch showed, and the key of a profile of it."""

    graph: LayerGraph
    costs: CostTable
    swaps: list[tuple[int, float]]
    key: dict[str, str]


def _see(assembly: Assembly, inputs: Mapping[str, Any], forward: Callable[[], Any]) -> _Seen:
    parts, layers, graph = assembly.parts, assembly.layers, assembly.runner.graph
    costs, resident = observe(parts, layers, forward, loss_of, 0, graph.resident)
    timing = Timing(parts.device, layers, parts.residency, parts.lending, parts.layer_calls, parts.random)
    timed = timing.run(costs, forward, loss_of, 0, resident)
    key = assembly.runner.measuring.key(costs.calls, inputs)
    return _Seen(replace(graph, calls=costs.calls, resident=resident), timed, timing.swaps, key)


def _survey(assembly: Assembly, config: Config, seen: _Seen, machine: Machine) -> Survey:
    element = ElementBytes(config.compute_dtype.itemsize, config.accumulation_dtype.itemsize)
    profile = Profile(machine, ((config.micro_batch, seen.costs),), seen.key)
    request = assembly.runner.request(seen.graph, config.gradient_accumulation_steps)
    return Survey(seen.graph, profile, element, request)
