"""Survey of a model on a machine, before it is trained: its layers, their costs, and the request for a plan.

`measure` runs one micro-batch on the device. `estimate` does the same on a device that does not exist: model and inputs
are on torch's meta device, so that nothing is allocated or computed, and a clock says what a described machine would
take (`profiler.roofline`). Layers are found, intercepted and cut by the code that trains, in both. Costs that depend on
values (how many tokens an expert gets) cannot be estimated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from harmony_ds.assembly.assemble import assemble
from harmony_ds.config import Config, Section, for_loaded_model
from harmony_ds.config.optimizers import state_numbers
from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.device import Device, DeviceGroup
from harmony_ds.device.meta import MetaDevice
from harmony_ds.distributed.exchange import buffer_bytes
from harmony_ds.errors import ConfigError, DoesNotFitError, ModelError, ProfileError
from harmony_ds.estimate.subject import Subject
from harmony_ds.model.intercept import Autocast
from harmony_ds.model.trees import map_tensors
from harmony_ds.profiling.hardware import Hardware, KernelRates, UpdateCost
from harmony_ds.profiling.profiler import SEVERAL
from harmony_ds.profiling.roofline import RooflineClock, on_meta
from harmony_ds.profiling.sample import Sample
from harmony_ds.runtime.micro_batch import loss_of
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.packing import ElementBytes
from harmony_ds.scheduler.profile import Machine, Profile
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.sizes import WHOLE, SizedCosts, Sizes, combined, rank_sizes
from harmony_ds.step.engine_state import EngineState

_MODEL_KEYS = ("model", "shapes", "dtypes", "torch")
_ADAM = Section("AdamW", {"torch_adam": True})
"""Taken for the optimizer where none is configured: the program will pass one."""
_NO_RATES = KernelRates(1.0, 1.0, 1.0, 1.0, 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Survey:
    """Knowledge of a model on a machine.

    Attributes:
        subject, config: as they were given.
        graph: layers, parameters and the call order.
        profile: costs of the configured micro-batch (in slices of several sizes, where the search may choose), and the
            machine's rates.
        costs: of the configured micro-batch, in the slices that its layer calls are cut into.
        request: the ds_config's wishes for a plan.
        may_join: whether layer calls may take the rows of several micro-batches.
    """

    subject: Subject
    config: Config
    graph: LayerGraph
    profile: Profile
    costs: CostTable
    request: PlanRequest
    may_join: bool = False

    @property
    def element(self) -> ElementBytes:
        """Bytes per element on the link."""
        return ElementBytes(self.config.compute_dtype.itemsize, self.config.accumulation_dtype.itemsize)

    def among(self, devices: int) -> Survey:
        """Return the survey of each of so many such devices that train the model on one host."""
        if devices == 1:
            return self
        request, residency = self.request, self.request.settings.residency
        request = replace(
            request,
            settings=replace(request.settings, residency="kept" if residency == "auto" else "off"),
            policy=replace(request.policy, devices=devices),
            exchange_bytes=buffer_bytes(request.budget_bytes),
        )
        profile = replace(self.profile, machine=self.profile.machine.among(devices))
        return replace(self, profile=profile, request=request, may_join=False)

    def under(self, config: Config) -> Survey:
        """Return the survey for a quick search under a ds_config of other gradients, stash or length of a step."""
        request, steps = self.request, config.gradient_accumulation_steps
        request = replace(
            request,
            settings=replace(request.settings, stash=config.harmony.stash),
            policy=replace(request.policy, deferred_update=config.deferred_update),
            micro_batches=-(-steps // request.policy.joined_count),
            thorough=False,
        )
        return replace(self, config=config, request=request)


def estimate(subject: Subject, config: Config, hardware: Hardware) -> Survey:
    """Survey a machine that is only described, with `subject` on the meta device; it is left in the compute dtype.

    Raises:
        ModelError: the model cannot be decomposed, or not run without data.
        ConfigError: the ds_config asks for torch_autocast, or for a disk whose rate is not known.
    """
    config = _in_dtype_of(subject, config)
    if config.autocast_dtype is not None:
        raise ConfigError(
            "torch.autocast does not reach the meta device, on which estimates are made: use `harmony-ds plan` on a "
            'machine that has the device, or switch "torch_autocast" off.'
        )
    if (config.disk_folder or config.weights_folder) is not None and hardware.disk_gb_per_s is None:
        raise ConfigError(
            'offload_optimizer or offload_param has "device": "nvme", and how fast that disk is cannot be measured here: '
            "say what it reads or writes in a second (--nvme-gb-per-s 3)."
        )
    return _on_meta(subject, config, hardware.machine(update_cost(config)), hardware.kernels())


def measure(subject: Subject, config: Config) -> Survey:
    """Survey this machine, with `subject` in host memory.

    Raises:
        ModelError: the model cannot be decomposed.
        BaseException: the model raised it.
    """
    config = _in_dtype_of(subject, config)
    measured = replace(config, optimizer=config.optimizer or _ADAM, harmony=replace(config.harmony, profile=None))
    state = assemble(subject.model, measured, None, None, None)
    try:
        moved = map_tensors(state.runtime.device.upload, subject.inputs)
        return _see(state, replace(subject, inputs=moved), config, None)
    finally:
        state.destroy()


def with_profile(subject: Subject, config: Config, profile: Profile) -> Survey:
    """Survey a machine that was measured before, of which `profile` was saved, with `subject` on the meta device.

    Raises:
        ProfileError: `profile` is of another model, or of smaller micro-batches.
        ModelError: the model cannot be decomposed, or not run without data.
    """
    config = _in_dtype_of(subject, config)
    found = _on_meta(subject, config, profile.machine, None)
    Profile(profile.machine, profile.tables, _of_model(profile)).check(_of_model(found.profile))
    if profile.calls != found.graph.calls:
        raise ProfileError("the profile's layers are called in another order than this model's: profile again.")
    if profile.key.get("pieces") != found.profile.key.get("pieces"):
        raise ProfileError(
            "the profile was made with another harmony.micro_batch than the ds_config's: profile again, with this "
            "ds_config."
        )
    if profile.key.get("pieces") != SEVERAL:
        costs = profile.at(config.micro_batch)
        return replace(found, profile=replace(profile, tables=((config.micro_batch, costs),)), costs=costs)
    return _sized(replace(found, profile=profile), config.micro_batch)


def _in_dtype_of(subject: Subject, config: Config) -> Config:
    return for_loaded_model(config, {parameter.dtype for parameter in subject.model.parameters()})


def _of_model(profile: Profile) -> dict[str, str]:
    """Return the part of a profile's key that does not depend on the machine."""
    return {name: profile.key[name] for name in _MODEL_KEYS if name in profile.key}


def update_cost(config: Config) -> UpdateCost:
    """Return the bytes that the configured optimizer moves in host memory per parameter."""
    section = config.optimizer
    states = 2 if section is None else state_numbers(section.type, section.params)
    states = 2 if states is None else states  # taken for Adam-like
    master = config.master_bytes or config.master_dtype.itemsize
    copy = config.compute_dtype.itemsize if config.master_bytes else 0
    weight, state = config.compute_dtype.itemsize, config.state_dtype.itemsize
    kept = states * state + (master if weight < master else 0)
    disk = 0 if config.disk_folder is None else kept
    disk_weight = 0 if config.weights_folder is None else weight
    return UpdateCost(states, config.accumulation_dtype.itemsize, copy, master, state, disk, disk_weight)


def _on_meta(subject: Subject, config: Config, machine: Machine, rates: KernelRates | None) -> Survey:
    """Survey on the meta device; `rates`: that times are computed with (None: they are known from elsewhere)."""
    budget = config.harmony.budget_bytes or machine.device_bytes
    with on_meta(rates or _NO_RATES) as clock:
        device = _meta_devices(config, clock, budget, "cuda" if machine.copies_overlap else "cpu")
        state = assemble(subject.model, _bare(config), None, None, device)
        try:
            return _see(state, subject, config, machine, ranks_sizes=rates is not None)
        except DoesNotFitError:
            raise
        except (NotImplementedError, RuntimeError) as error:
            raise ModelError(f"the model does not run on the meta device ({error}): profile it with data.") from error
        finally:
            state.destroy()


def _meta_devices(config: Config, clock: RooflineClock, budget: int | None, optimizer_device: str) -> Device:
    """Return as many as are wanted."""
    wanted = config.harmony.devices
    if wanted == "all":
        raise ConfigError('harmony.devices is "all", and the machine is only described: say how many (--devices).')
    count = len(wanted) if isinstance(wanted, tuple) else int(wanted)
    made = [MetaDevice(lambda: clock.ms, lambda: clock.issued_ms, budget, optimizer_device) for _ in range(count)]
    return made[0] if count == 1 else DeviceGroup(made)


def _bare(config: Config) -> Config:
    """Return the config without files, and with an optimizer."""
    optimizer, residency = config.optimizer or _ADAM, config.harmony.residency
    options = optimizer.params
    as_given = options.get("bias_correction") is not False or options.get("torch_adam")
    if config.disk_folder is not None or not as_given:  # the device would not step as the host does
        residency = "kept" if residency == "auto" else "off"
    settings = replace(config.harmony, plan=None, profile=None, residency=residency)
    return replace(config, optimizer=optimizer, harmony=settings, disk_folder=None, weights_folder=None)


def _see(
    state: EngineState, subject: Subject, config: Config, machine: Machine | None, ranks_sizes: bool = True
) -> Survey:
    """Survey with one micro-batch.

    Args:
        machine: its rates, if they need not be measured.
        ranks_sizes: whether sizes of layer calls are chosen where the ds_config leaves them open.
    """
    planner = state.planner
    profiler, wanted = planner.profiler, planner.sizes.wanted
    profiler.machine = machine

    dtype = config.autocast_dtype
    autocast = None if dtype is None else Autocast(state.device.torch_device.type, dtype)

    def call(named: dict[str, Any]) -> Any:
        with Autocast.entered(autocast):
            return subject.model(**named)

    sample = Sample(subject.inputs, call, loss_of, seed=0)
    sized, profile = planner.sizes.joined(sample) or (None, profiler.profile(sample, wanted))
    sized = sized or SizedCosts(wanted or WHOLE, profile.tables[-1][1])
    if ranks_sizes and wanted is None:
        try:
            sized = next(planner.sizes.ranked(sample, profile))
        except DoesNotFitError:
            sized = SizedCosts(*_smallest(profile, sample.rows))
    graph = planner.graph_with(profile.calls)
    request = planner.request(graph, config.gradient_accumulation_steps, sized.sizes)
    return Survey(subject, config, graph, profile, sized.table, request, planner.sizes.may_join)


def _smallest(profile: Profile, rows: int) -> tuple[Sizes, CostTable]:
    """Return the smallest slices, and their costs."""
    sizes = Sizes(profile.tables[0][0], profile.tables[0][0])
    return sizes, combined(profile, sizes, rows)


def _sized(survey: Survey, rows: int) -> Survey:
    """Return the survey with the slices of the fastest plan; with the smallest if nothing fits."""
    profile = survey.profile

    def with_sizes(sizes: Sizes) -> Survey:
        policy = replace(survey.request.policy, forward_rows=sizes.forward, backward_rows=sizes.backward)
        costs = combined(profile, sizes, rows)
        return replace(survey, costs=costs, request=replace(survey.request, policy=policy))

    def choose(costs: CostTable, sizes: Sizes) -> Choice:
        request = replace(with_sizes(sizes).request, thorough=False)
        return search(survey.graph, costs, profile.machine, survey.element, request)[0]

    try:
        return with_sizes(rank_sizes(profile, rows, choose)[0])
    except DoesNotFitError:
        return with_sizes(_smallest(profile, rows)[0])
