"""The search for a plan as one model asks for it: of all processes together, and beside what its allocator needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce

from harmony_ds.config import Config
from harmony_ds.decomposer.graph import LayerGraph, slab_bytes
from harmony_ds.distributed.exchange import buffer_bytes
from harmony_ds.errors import DoesNotFitError
from harmony_ds.profiling.profiler import Profiler
from harmony_ds.profiling.progress import Progress
from harmony_ds.runtime.garbage import no_collections
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.allocator_fit import (
    Fitting,
    beside_uploads,
    is_replayed,
    is_served,
    leaving,
    replayed,
    search_fitting,
    serves,
)
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.grid import amount
from harmony_ds.scheduler.joining import Advice, JoinedCosts, advise
from harmony_ds.scheduler.packing import ElementBytes
from harmony_ds.scheduler.plan import Plan, Policy
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.resident import why_not_resident
from harmony_ds.scheduler.saved import adopt
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.sizes import WHOLE, Sizes
from harmony_ds.step.beside_plans import BesidePlans
from harmony_ds.step.call_cuts import CallCuts, ShortOfRoomError

_logger = logging.getLogger(__name__)

_TOP = 10
"""Plans that are kept for reports, the one that runs included."""


class PlanSearch:
    """Searches for plans of one model, with costs that the planner has measured; all processes get the same.

    Attributes:
        host_bytes: of the host's memory, what there is for what waits there; None: not known.
        smallest_ratio: elements of the smallest micro-batch over those of the largest, with which allocations are replayed.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        profiler: Profiler,
        progress: Progress,
        cuts: CallCuts,
        beside: BesidePlans,
        saved: Plan | None,
    ) -> None:
        """Search as `config` says, or run `saved`, if given, in the place of a search."""
        self._runtime = runtime
        self._settings = config.harmony
        self._profiler = profiler
        self._progress = progress
        self._cuts = cuts
        self._beside = beside
        self._saved = saved
        self._element = ElementBytes(config.compute_dtype.itemsize, config.accumulation_dtype.itemsize)
        self._policy = Policy(
            grouping=config.harmony.grouping,
            prefetch=config.harmony.prefetch,
            gradient_slabs=config.harmony.gradient_slabs * runtime.device.count,
            deferred_update=config.deferred_update,
            devices=runtime.world.local_size,
            servers=runtime.world.servers,
            pipeline=runtime.device.count,
        )
        self.host_bytes: int | None = None
        self.smallest_ratio = 1.0

    # ---- what is asked

    def request(
        self, graph: LayerGraph, group_size: int, sizes: Sizes = WHOLE, left_free_bytes: int = 0
    ) -> PlanRequest:
        """Return what is asked of the search for a plan, which is to leave `left_free_bytes` of the budget free."""
        budget = self._runtime.device.budget_bytes
        beside = self._beside.fixed_bytes + self._beside.shared_loss_bytes + left_free_bytes
        from_host, tiles = sizes.from_host, self._cuts.tiles_in_use
        return PlanRequest(
            settings=self._settings,
            micro_batches=-(-group_size // sizes.joined_count),
            budget_bytes=None if budget is None else max(0, budget - beside),
            beside_bytes=beside if budget is None else min(beside, budget),
            resident_bytes=self._resident_bytes(graph),
            exchange_bytes=self._runtime.world.reduce_bytes(self._runtime.device),
            policy=replace(
                self._policy,
                prefetch=self._policy.prefetch and not from_host,
                crossing_on_host=from_host,
                slices_from_host=from_host,
                joined_count=sizes.joined_count,
                forward_rows=sizes.forward,
                backward_rows=sizes.backward,
                tile_tokens=tiles.head,
                layer_tile_tokens=tiles.layers,
            ),
            host_bytes=self.host_bytes,
        )

    def _resident_bytes(self, graph: LayerGraph) -> int:
        """Return bytes of buffers, and of what autograd makes on the way into unlayered parameters' gradients."""
        trained = [spec for name in graph.unlayered if (spec := graph.parameter(name)).trainable]
        made = 0 if self._runtime.device_copies.accumulates_in_place else self._element.weight
        return self._runtime.installation.buffers.nbytes + sum(slab_bytes(spec.numel, made) for spec in trained)

    def _machine(self) -> Machine:
        """Return the rates that plans are made with: the slowest of all processes, which run one plan."""
        # They wait for each other at every reduction: a step takes as long as in the slowest of them. What they share
        # (host memory, cores) they measure at the same time, so that no rate is to be divided or added up.
        world, machine = self._runtime.world, self._profiler.machine
        assert machine is not None
        if world.size > 1:
            machine = machine.with_peers(*world.reduce_rates(self._runtime.device))
        return reduce(Machine.slower, world.gather_values("rates", machine))

    # ---- plans

    def choose(
        self, graph: LayerGraph, costs: CostTable, group_size: int, sizes: Sizes, thorough: bool = True
    ) -> tuple[Choice, ...]:
        """Return the best plans, as the first process finds them. `thorough`: see `PlanRequest`.

        They leave to the device's allocator what it is expected to need, if any plan fits beside that. If one does, and the
        allocator can serve none of those, it is not searched again with nothing left: such plans have more in use. Where
        no other cuts of layer calls are tried any more, a plan runs that the allocator cannot serve, with a warning.

        Raises:
            DoesNotFitError: none fits, or (`ShortOfRoomError`) none that the allocator can serve, and other cuts are tried.
        """
        fragment_bytes = 0
        if self._saved is None:
            fragment_bytes = self._runtime.device.fragment_bytes(costs.working_bytes)
        leaves_some = self._saved is None and fragment_bytes + self._beside.left_free_bytes > 0
        machine = self._machine()
        if leaves_some:
            found = self._choose_beside_fragments(graph, costs, machine, group_size, sizes, thorough, fragment_bytes)
            if found is not None:
                return found
        request = replace(self.request(graph, group_size, sizes), thorough=thorough)

        def find() -> tuple[Choice, ...]:
            return self._search(graph, costs, machine, request)

        choices = self._runtime.world.compute_on_first("plan", find)
        choices = self._check_allocator(choices, beside_uploads(request, costs), costs)
        if thorough and leaves_some:
            self._beside.leave_nothing_free()
        return choices

    def _choose_beside_fragments(
        self,
        graph: LayerGraph,
        costs: CostTable,
        machine: Machine,
        group_size: int,
        sizes: Sizes,
        thorough: bool,
        fragment_bytes: int,
    ) -> tuple[Choice, ...] | None:
        """Return the best plans that leave free what the allocator needs, which is about `fragment_bytes`.

        None: no plan fits beside that. Raises ShortOfRoomError as `choose` does.
        """
        beside = self._beside
        whole = replace(self.request(graph, group_size, sizes, beside.left_free_bytes), thorough=thorough)
        less = beside_uploads(whole, costs)
        search_with = partial(self._search, graph, costs, machine)

        def find() -> Fitting:
            if is_replayed(less, costs):
                most_bytes = max(fragment_bytes, beside.fragment_bytes)
                return search_fitting(search_with, less, costs, most_bytes, self.smallest_ratio)
            return Fitting(search_with(leaving(less, fragment_bytes)), fragment_bytes)

        # Each process may have another budget: one decides for all how often is searched.
        try:
            fitting = self._runtime.world.compute_on_first("plan", find)
        except DoesNotFitError:
            return None
        if not thorough:  # one of several that are compared
            return fitting.choices
        beside.fragment_bytes = fitting.fragment_bytes
        beside.upload_bytes = less.beside_bytes - whole.beside_bytes
        return self._check_allocator(fitting.choices, less, costs)

    def _search(
        self, graph: LayerGraph, costs: CostTable, machine: Machine, request: PlanRequest
    ) -> tuple[Choice, ...]:
        """Return the best plans for what is asked, see `choose`; called in the first process alone."""
        if self._saved is not None:
            return (adopt(self._saved, graph, costs, machine, self._element, request),)
        with self._progress.searching(len(costs.calls)), no_collections():
            choices = search(graph, costs, machine, self._element, request, top=_TOP if request.thorough else 1)
        if request.thorough and self._settings.parallel == "auto" and self._runtime.device.count > 1:
            choices += tuple(self._of_replicas(graph, costs, machine, request))
            _tell_of_replicas(choices)
        if isinstance(self._settings.residency, int):
            for reason in why_not_resident(choices[0].plan.packing, self._settings.residency):
                _logger.warning("%s", reason)
        return choices

    def _of_replicas(
        self, graph: LayerGraph, costs: CostTable, machine: Machine, request: PlanRequest
    ) -> Iterator[Choice]:
        """Yield the plan, found by a quick search, of as many processes as there are devices, each of which has one."""
        count, processes = self._runtime.device.count, self._runtime.device.count * self._policy.devices
        asked = replace(
            request,
            policy=replace(request.policy, devices=processes, pipeline=1),
            micro_batches=-(-request.micro_batches // count),
            exchange_bytes=buffer_bytes(request.budget_bytes),
            thorough=False,
        )
        with suppress(DoesNotFitError):
            best = search(graph, costs, machine.among(count), self._element, asked)[0]
            yield replace(best, reason=f"{processes} replicas (torchrun --nproc_per_node {processes}): {best.reason}")

    # ---- the device's allocator

    def check_served(self, plan: Plan, request: PlanRequest, costs: CostTable) -> None:
        """Raise ShortOfRoomError if the allocator could not serve `plan`, and layer calls may still be cut.

        `request`: for all of the budget.
        """
        less = beside_uploads(request, costs)
        if self._cuts.may_try_others and is_replayed(less, costs) and not serves(plan, less, costs):
            raise _short_of_room()

    def _check_allocator(
        self, choices: tuple[Choice, ...], request: PlanRequest, costs: CostTable
    ) -> tuple[Choice, ...]:
        """Return the choices, the first one, which is to run, with what the allocator has to reserve for its plan.

        Warn if the budget is too small for that.

        Raises:
            ShortOfRoomError: it is, and layer calls may still be cut.
        """
        if request.budget_bytes is None or not is_replayed(request, costs):
            return choices

        def check() -> Choice:
            chosen = choices[0]
            if chosen.reserved_bytes is None:
                chosen = replayed(chosen, request, costs, self.smallest_ratio)
            if not is_served(chosen, request):
                if self._cuts.may_try_others:
                    raise _short_of_room()
                self._warn_of_allocator(chosen, request)
            return chosen

        # As in a search: one process decides for all.
        return (self._runtime.world.compute_on_first("plan", check), *choices[1:])

    def _warn_of_allocator(self, chosen: Choice, request: PlanRequest) -> None:
        """Warn that the allocator cannot serve the plan that is to run; called in the first process alone."""
        assert chosen.reserved_bytes is not None and self._runtime.device.budget_bytes is not None
        plan, remedy = "harmony.plan", "plan again"
        if self._saved is None:
            plan, remedy = "the fastest plan that fits", "take smaller micro-batches"
        _logger.warning(
            "torch's allocator has to reserve %s for %s, and the budget is %s, %s of it set aside: in each step it "
            "gives back memory, takes it again, and waits for the device. Raise harmony.device_memory_gib, or %s.",
            amount(chosen.reserved_bytes),
            plan,
            amount(self._runtime.device.budget_bytes),
            amount(request.beside_bytes),
            remedy,
        )

    def replay(self, choice: Choice, graph: LayerGraph, costs: CostTable, group_size: int) -> tuple[Choice, bool]:
        """Return a choice with what the allocator has to reserve for its plan, and whether it can serve that."""
        left_bytes = self._beside.left_free_bytes + self._beside.upload_bytes
        request = self.request(graph, group_size, left_free_bytes=left_bytes)
        if not self._runtime.device.has_caching_allocator or not is_replayed(request, costs):
            return choice, True
        choice = replayed(choice, request, costs, self.smallest_ratio)
        return choice, is_served(choice, request)

    # ---- advice

    def advise_joining(
        self, choice: Choice, graph: LayerGraph, costs: CostTable, rows: int, group_size: int
    ) -> Advice | None:
        """Return joined calls that would be much faster than `choice`, and log them, once for all processes."""
        joined = JoinedCosts(graph, costs, self._machine(), self._element)
        request = self.request(graph, group_size)

        def found() -> Advice | None:
            advice = advise(choice, rows, request, joined)
            if advice is not None:
                _logger.warning("%s", advice)
            return advice

        return self._runtime.world.compute_on_first("advice", found)


def _short_of_room() -> ShortOfRoomError:
    return ShortOfRoomError("torch's allocator would have to reserve more than the budget.")


def _tell_of_replicas(choices: tuple[Choice, ...]) -> None:
    best, last = choices[0], choices[-1]
    if last.prediction.step_ms < best.prediction.step_ms:
        _logger.warning(
            "a step is predicted to take %.1f ms with the plan that runs, %s, and %.1f with %s",
            best.prediction.step_ms,
            best.reason,
            last.prediction.step_ms,
            last.reason,
        )
