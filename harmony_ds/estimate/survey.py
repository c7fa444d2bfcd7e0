"""Survey a model on a machine before it is trained: find its layers, what they cost, and what a plan has to heed.

There are three ways to a `Survey`. In each of them, layers are found, intercepted and cut by the code that trains:

    measure        runs one micro-batch on this machine's device, and times it
    estimate       runs it on torch's meta device, where nothing is allocated or computed; a clock says what a machine
                   that is only described would take (profiling/roofline.py)
    with_profile   runs it there, too, to find the layers; their costs are those of a profile that was saved before

Costs that depend on values (how many tokens an expert gets) cannot be estimated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from harmony_ds.assembly.assemble import assemble
from harmony_ds.config import Config, Section, for_loaded_model, trained_dtypes
from harmony_ds.config.harmony import ResidencyChoice
from harmony_ds.config.optimizers import state_numbers
from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.device import Device, DeviceGroup
from harmony_ds.device.meta import MetaDevice
from harmony_ds.distributed.exchange import buffer_bytes
from harmony_ds.errors import ConfigError, DoesNotFitError, ModelError, ProfileError
from harmony_ds.estimate.subject import Subject
from harmony_ds.model.intercept import Autocast
from harmony_ds.model.trees import map_tensors
from harmony_ds.optim.device_optimizer import is_stepped_on_device
from harmony_ds.profiling.hardware import Hardware, KernelRates, UpdateCost
from harmony_ds.profiling.profiler import IN_LAYERS, SEVERAL, TOKENS
from harmony_ds.profiling.roofline import RooflineClock, on_meta
from harmony_ds.profiling.sample import Sample, form_of_inputs
from harmony_ds.runtime.micro_batch import loss_of
from harmony_ds.scheduler.choose import PlanRequest, make_plan, may_move_crossing
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.estimator import CandidateEstimator
from harmony_ds.scheduler.packing import ElementBytes, Packer
from harmony_ds.scheduler.partition import uniform_bounds
from harmony_ds.scheduler.plan import ALL_PACKS, Packing, Policy
from harmony_ds.scheduler.profile import Machine, Profile
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.sizes import WHOLE, SizedCosts, Sizes, combined, rank_sizes
from harmony_ds.step.engine_state import EngineState

_MODEL_KEYS = ("model", "shapes", "dtypes", "torch")
_ADAM = Section("AdamW", {"torch_adam": True})
"""Taken for the optimizer where none is configured: the program will pass one."""
_NO_RATES = KernelRates(1.0, 1.0, 1.0, 1.0, 1.0, 0.0)
MOST_LISTED = 1024
"""Of a step with more micro-batches than this, a forecast walks a few that stand for all: its plan is never run."""
_MOST_IN_WAVES = 256
"""Micro-batches of a step of several devices, of which a forecast simulates every one: minutes."""


@dataclass(frozen=True, slots=True)
class Survey:
    """A model on a machine: all that a search for a plan needs to know of them.

    Attributes:
        subject, config: the model with its inputs, and the ds_config, as they were given.
        graph: layers, parameters and the call order.
        profile: costs of the configured micro-batch (in slices of several sizes, where the search may choose), and the
            machine's rates.
        costs: of the configured micro-batch, in the slices that its layer calls are cut into.
        request: what the ds_config asks of a plan: memory budgets, policy, number of micro-batches.
        may_join: whether layer calls may take the rows of several micro-batches.
        fragment_bytes: what the request leaves of the budget for memory in pieces, of which the plan that is found may need
            more or less.
    """

    subject: Subject
    config: Config
    graph: LayerGraph
    profile: Profile
    costs: CostTable
    request: PlanRequest
    may_join: bool = False
    fragment_bytes: int = 0

    @property
    def element(self) -> ElementBytes:
        """Bytes of one weight and of one gradient element on the link between host and device."""
        return ElementBytes(self.config.compute_dtype.itemsize, self.config.accumulation_dtype.itemsize)

    def among(self, devices: int) -> Survey:
        """Return the survey of one of `devices` such devices on one host, each trained on by a process of its own."""
        if devices == 1:
            return self
        request, residency = self.request, self.request.settings.residency
        request = replace(
            request,
            settings=replace(request.settings, residency=_without_updates_on_device(residency)),
            policy=replace(request.policy, devices=devices),
            exchange_bytes=buffer_bytes(request.budget_bytes),
        )
        profile = replace(self.profile, machine=self.profile.machine.among(devices))
        return replace(self, profile=profile, request=request, may_join=False)

    def under(self, config: Config) -> Survey:
        """Return the survey for a quick search under a ds_config with other gradients, stash, optimizer state, or
        micro-batches in a step.

        Layers and costs stay as they are: `config` must leave model, dtype and micro-batch as they were surveyed.
        """
        request, steps = self.request, config.gradient_accumulation_steps
        request = replace(
            request,
            settings=replace(
                request.settings,
                stash=config.harmony.stash,
                residency=_residency_under(config, request.settings.residency),
            ),
            policy=replace(request.policy, deferred_update=config.deferred_update),
            micro_batches=-(-steps // request.policy.joined_count),
            thorough=False,
        )
        return replace(self, config=config, request=request)


def estimate(subject: Subject, config: Config, hardware: Hardware) -> Survey:
    """Survey a machine that is only described. The model of `subject`, on the meta device, is cast to the compute dtype.

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
    machine = hardware.machine(update_cost(config))
    return _survey_on_meta(subject, config, machine, hardware.kernels(), chooses_sizes=True)


def measure(subject: Subject, config: Config) -> Survey:
    """Survey this machine by running one micro-batch; `subject` is in host memory.

    Raises:
        ModelError: the model cannot be decomposed.
        BaseException: the model's own code raised it.
    """
    config = _in_dtype_of(subject, config)
    measured = replace(config, optimizer=config.optimizer or _ADAM, harmony=replace(config.harmony, profile=None))
    state = assemble(subject.model, measured, None, None, None)
    try:
        moved = map_tensors(state.runtime.device.upload, subject.inputs)
        return _survey(state, replace(subject, inputs=moved), config, machine=None, chooses_sizes=True)
    finally:
        state.destroy()


def with_profile(subject: Subject, config: Config, profile: Profile) -> Survey:
    """Survey the machine that `profile` was measured on, without it; `subject` is on the meta device.

    Raises:
        ProfileError: `profile` is of another model, or of smaller micro-batches.
        ModelError: the model cannot be decomposed, or not run without data.
    """
    config = _in_dtype_of(subject, config)
    in_tiles = replace(config, harmony=replace(config.harmony, tokens=_tokens_of(profile)))
    found = _survey_on_meta(subject, in_tiles, profile.machine, _NO_RATES, chooses_sizes=False)
    asked = config.harmony
    settings = replace(found.request.settings, tokens=asked.tokens, progress=asked.progress)
    found = replace(found, config=config, request=replace(found.request, settings=settings))
    Profile(profile.machine, profile.tables, _key_of_model(profile)).check(_key_of_model(found.profile))
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
    return _with_fastest_slices(replace(found, profile=profile), config.micro_batch)


def _tokens_of(profile: Profile) -> Literal["off"] | tuple[int, int]:
    """Return harmony.tokens as the profile was measured with."""
    if TOKENS not in profile.key:
        return "off"
    head, layers = profile.key[TOKENS].split(IN_LAYERS)
    return int(head), int(layers)


def smallest_peak_bytes(survey: Survey) -> int:
    """Return the device bytes of the most frugal plan: a pack for every layer call, no prefetch, everything on the host."""
    overlaps = survey.profile.machine.copies_overlap
    return _smallest_peak_bytes(survey.graph, survey.costs, survey.element, survey.request, overlaps)


def _smallest_peak_bytes(
    graph: LayerGraph, costs: CostTable, element: ElementBytes, request: PlanRequest, copies_overlap: bool
) -> int:
    packing, policy = _most_frugal(graph, costs, element, request, copies_overlap)
    estimator = CandidateEstimator(costs, request)
    return max(estimator.stage_peaks(estimator.sample(packing, policy)))


def _most_frugal(
    graph: LayerGraph, costs: CostTable, element: ElementBytes, request: PlanRequest, copies_overlap: bool
) -> tuple[Packing, Policy]:
    """Return packs and policy of the most frugal plan."""
    early = request.policy.prefetch and request.is_manual and not copies_overlap
    packer = Packer(graph, costs, element, request.policy)
    packing = packer.packing(uniform_bounds(len(graph.calls), request.settings.pack_layers or 1))
    return packing, frugal_policy(replace(request.policy, prefetch=early), request)


def frugal_policy(policy: Policy, request: PlanRequest) -> Policy:
    """Return the policy with all on the host that may wait there, nothing kept and no graphs."""
    away = 0 if request.settings.stash == "device" else ALL_PACKS
    moves = may_move_crossing(request)
    return replace(policy, stash_on_host=away, crossing_on_host=moves, kept=(), graphs=())


def _in_dtype_of(subject: Subject, config: Config) -> Config:
    """Return the ds_config as it trains a model that was loaded in the dtype that `subject` has."""
    return for_loaded_model(config, trained_dtypes(subject.model))


def _key_of_model(profile: Profile) -> dict[str, str]:
    """Return the part of a profile's key that does not depend on the machine."""
    return {name: profile.key[name] for name in _MODEL_KEYS if name in profile.key}


def update_cost(config: Config) -> UpdateCost:
    """Return the bytes that an update of one parameter moves in host memory and on a disk, as configured."""
    section = config.optimizer
    states = None if section is None else state_numbers(section.type, section.params)
    if states is None:  # the optimizer is not known: taken for one like Adam
        states = 2
    weight_bytes, state_bytes = config.compute_dtype.itemsize, config.state_dtype.itemsize
    master_bytes = config.master_bytes or config.master_dtype.itemsize
    kept_bytes = states * state_bytes + (master_bytes if weight_bytes < master_bytes else 0)
    return UpdateCost(
        states=states,
        gradient_bytes=config.accumulation_dtype.itemsize,
        copy_bytes=weight_bytes if config.master_bytes else 0,
        master_bytes=master_bytes,
        state_bytes=state_bytes,
        disk_bytes=0 if config.disk_folder is None else kept_bytes,
        disk_weight_bytes=0 if config.weights_folder is None else weight_bytes,
    )


def _survey_on_meta(
    subject: Subject, config: Config, machine: Machine, rates: KernelRates, chooses_sizes: bool
) -> Survey:
    """Survey `machine` by running one micro-batch on the meta device.

    Args:
        rates: what the clock computes the times of kernels with.
        chooses_sizes: see `_survey`.
    """
    budget = config.harmony.budget_bytes or machine.device_bytes
    with on_meta(rates) as clock:
        device = _meta_devices(config, clock, budget, "cuda" if machine.copies_overlap else "cpu")
        state = assemble(subject.model, _config_on_meta(config), None, None, device)
        try:
            return _survey(state, subject, config, machine, chooses_sizes)
        except DoesNotFitError:
            raise
        except (NotImplementedError, RuntimeError) as error:
            raise ModelError(f"the model does not run on the meta device ({error}): profile it with data.") from error
        finally:
            state.destroy()


def _meta_devices(config: Config, clock: RooflineClock, budget: int | None, optimizer_device: str) -> Device:
    """Return a meta device, or a group of as many as the ds_config's `harmony.devices` says."""
    wanted = config.harmony.devices
    if wanted == "all":
        raise ConfigError('harmony.devices is "all", and the machine is only described: say how many (--devices).')
    count = len(wanted) if isinstance(wanted, tuple) else int(wanted)
    steps = config.gradient_accumulation_steps
    if count > 1 and steps > _MOST_IN_WAVES:
        raise ConfigError(
            f"a step of {steps:,} micro-batches through a pipeline of {count} devices is not estimated, since each one is "
            f"simulated on each device: say {_MOST_IN_WAVES} or fewer (--accumulation 64). A larger step changes tokens "
            "a second little, and its stash grows evenly."
        )
    # A share of the machine's memory is left beside a budget that is not given.
    leaves_room = optimizer_device == "cuda" and config.harmony.budget_bytes is not None
    made = [MetaDevice(clock, budget, optimizer_device, leaves_room) for _ in range(count)]
    return made[0] if count == 1 else DeviceGroup(made)


def _without_updates_on_device(residency: ResidencyChoice) -> ResidencyChoice:
    """Return how packs may stay on the device where none is updated there, as the engine lets them."""
    return "kept" if residency in ("auto", "kept") else "off"


def _residency_under(config: Config, residency: ResidencyChoice) -> ResidencyChoice:
    """Return how packs may stay on the device: as `residency` says, unless the ds_config lets the engine update none there.

    See `DeviceOptimizer.refusal`.
    """
    optimizer = config.optimizer or _ADAM
    device_steps_alike = optimizer.params.get("bias_correction") is not False or optimizer.params.get("torch_adam")
    masters_are_whole = config.disk_folder is None and not config.harmony.split_masters
    masters_are_fp32 = config.master_dtype == torch.float32
    if masters_are_whole and masters_are_fp32 and device_steps_alike and is_stepped_on_device(optimizer.type):
        return residency
    return _without_updates_on_device(residency)


def _config_on_meta(config: Config) -> Config:
    """Return the ds_config for an engine on the meta device: with an optimizer, without any file or disk, and with whole
    masters, since split ones are made of values.
    """
    residency = _residency_under(config, config.harmony.residency)
    settings = replace(
        config.harmony, plan=None, profile=None, residency=residency, progress=False, split_masters=False
    )
    return replace(config, optimizer=config.optimizer or _ADAM, harmony=settings, disk_folder=None, weights_folder=None)


def _survey(
    state: EngineState, subject: Subject, config: Config, machine: Machine | None, chooses_sizes: bool
) -> Survey:
    """Profile one micro-batch with an engine's parts, and return what was found.

    Where no plan would fit, layer calls take fewer rows or tokens at a time, unless the ds_config says otherwise.

    Args:
        state: the parts of an engine that trains the subject's model.
        machine: the machine's rates; None: they are measured, too.
        chooses_sizes: whether the fastest sizes of layer calls are chosen here where the ds_config leaves them open; if
            not, the costs are those of whole micro-batches.
    """
    planner = state.planner
    planner.profiler.machine = machine
    sample = _sample_of(subject, config, state)
    with suppress(DoesNotFitError):
        attempt = partial(_survey_that_fits, state, subject, config, sample, chooses_sizes)
        return planner.cuts.find_with_fewest(sample, attempt)
    return _survey_as_cut(state, subject, config, sample, chooses_sizes)


def _survey_that_fits(
    state: EngineState,
    subject: Subject,
    config: Config,
    sample: Sample,
    chooses_sizes: bool,
    tried: list[CostTable],
) -> Survey:
    """Do what `_survey_as_cut` does, and add costs to `tried`; raise DoesNotFitError if no plan fits the device, or none
    that its allocator can serve.
    """
    planner, copies_overlap = state.planner, state.device.copies_overlap
    element = ElementBytes(config.compute_dtype.itemsize, config.accumulation_dtype.itemsize)

    def request_for(graph: LayerGraph) -> PlanRequest:
        return planner.search.request(graph, config.gradient_accumulation_steps, planner.sizes.wanted or WHOLE)

    def check_bytes(costs: CostTable) -> None:
        tried.append(costs)
        graph = planner.graph_with(costs.calls)
        request = request_for(graph)
        peak_bytes = _smallest_peak_bytes(graph, costs, element, request, copies_overlap)
        if request.budget_bytes is not None and peak_bytes > request.budget_bytes:
            raise DoesNotFitError(
                f"the smallest plan takes {peak_bytes:,} bytes of {request.budget}.", peak_bytes + request.beside_bytes
            )

    found = _survey_as_cut(state, subject, config, sample, chooses_sizes, check_bytes)
    check_bytes(found.costs)
    request = replace(request_for(found.graph), most_listed=MOST_LISTED)
    if found.fragment_bytes and not request.is_sampled:
        packing, policy = _most_frugal(found.graph, found.costs, element, request, copies_overlap)
        planner.search.check_served(make_plan(packing, found.costs, request, policy), request, found.costs)
    return found


def _survey_as_cut(
    state: EngineState,
    subject: Subject,
    config: Config,
    sample: Sample,
    chooses_sizes: bool,
    check_bytes: Callable[[CostTable], None] | None = None,
) -> Survey:
    """Profile `sample` in the slices and tiles that are set, and return what was found; `check_bytes`: of the profiler."""
    planner = state.planner
    wanted = planner.sizes.wanted
    joined = planner.sizes.joined(sample)
    if joined is not None:
        sized, profile = joined
    else:
        profile = planner.profiler.profile(sample, wanted, check_bytes)
        sized = SizedCosts(wanted or WHOLE, profile.tables[-1][1])
    if wanted is None and chooses_sizes:
        try:
            sized = next(planner.sizes.ranked(sample, profile))
        except DoesNotFitError:
            smallest = _smallest_slices(profile)
            sized = SizedCosts(smallest, combined(profile, smallest, sample.rows))
    graph = planner.graph_with(profile.calls)
    fragment_bytes = state.device.fragment_bytes(sized.table.working_bytes)
    request = planner.search.request(graph, config.gradient_accumulation_steps, sized.sizes, fragment_bytes)
    return Survey(subject, config, graph, profile, sized.table, request, planner.sizes.may_join, fragment_bytes)


def _sample_of(subject: Subject, config: Config, state: EngineState) -> Sample:
    """Return the micro-batch of `subject` for the profiler, to be called under the ds_config's autocast."""
    dtype = config.autocast_dtype
    autocast = None if dtype is None else Autocast(state.device.torch_device.type, dtype)

    def call(named: dict[str, Any]) -> Any:
        with Autocast.entered(autocast):
            return subject.model(**named)

    return Sample(subject.inputs, call, loss_of, seed=0, inputs_form=form_of_inputs(subject.inputs, None))


def _smallest_slices(profile: Profile) -> Sizes:
    """Return the smallest size of slices that was profiled, for both passes."""
    rows, _ = profile.tables[0]
    return Sizes(rows, rows)


def _with_fastest_slices(survey: Survey, rows: int) -> Survey:
    """Return the survey with the slices of the fastest plan; with the smallest if no plan fits the device.

    Args:
        rows: the rows of a micro-batch.
    """
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
        return with_sizes(_smallest_slices(profile))
