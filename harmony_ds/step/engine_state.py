"""The state of one engine: everything that was made for it, until it is destroyed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from harmony_ds.decomposer.find import Layer
from harmony_ds.device import Device
from harmony_ds.distributed import SingleProcess
from harmony_ds.model.intercept import Interception
from harmony_ds.offload.host_store import HostStore
from harmony_ds.offload.ledger import Ledger
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.optim.optimizers import Masters
from harmony_ds.runtime.executor import Executor
from harmony_ds.runtime.leftovers import Leftovers
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.runtime.streaming import Streamer
from harmony_ds.step.health import EngineHealth
from harmony_ds.step.planner import Planner


@dataclass(frozen=True, slots=True)
class EngineState:
    """The objects that an engine owns until it is destroyed: memory, threads, the intercepted model, and what runs it.

    Attributes:
        layers: of the model.
        optimizer: the program's, or the ds_config's; None: there is none.
        host_optimizer: steps it, layer by layer, in host memory.
        masters: that stand in the place of the program's parameters in its optimizer.
    """

    device: Device
    store: HostStore
    ledger: Ledger
    runtime: Runtime
    world: SingleProcess
    planner: Planner
    executor: Executor
    streamer: Streamer
    health: EngineHealth
    interception: Interception
    layers: tuple[Layer, ...]
    optimizer: torch.optim.Optimizer | None
    host_optimizer: HostOptimizer | None
    masters: Masters

    def wait_for_updates(self) -> None:
        """Wait for all updates on the host, and for queued copies that read its memory."""
        self.runtime.updater.wait_all()
        self.runtime.resident_packs.finish_reads()

    def finish_updates(self) -> None:
        """Bring every weight, master and optimizer state on the host up to date."""
        self.wait_for_updates()
        self.runtime.resident_packs.sync_to_host()

    def free_device(self) -> None:
        """Move what stays on the device from step to step, weights and gradients, to the host."""
        self.runtime.updater.wait_all()
        self.executor.accumulated_gradients.to_host()
        self.runtime.resident_packs.evict_all()

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Let the model be called without gradients while open."""
        self.health.check_usable()
        self.runtime.updater.wait_all()
        graph = self.planner.graph
        with self.runtime.contract.running(), self.streamer.streaming(graph.unlayered, graph.calls):
            yield

    def host_bytes(self) -> dict[str, int]:
        """Return the bytes of host memory by kind."""
        optimizer = self.host_optimizer
        return {
            **self.store.host_bytes(),
            "optimizer": 0 if optimizer is None else optimizer.state_bytes(),
            "gradients": self.runtime.host_gradients.host_bytes,
            "casts": 0 if self.runtime.host_gradients.casts is None else self.runtime.host_gradients.casts.nbytes,
            "stash": self.runtime.stash.host_bytes,
        }

    def destroy(self) -> None:
        """Finish updates, end the thread, give the model its own forward and parameters back, and free memory.

        Raises:
            BaseException: an update's failure that was not raised yet, after all of that.
        """
        self.runtime.updater.stop()
        self.health.is_destroyed = True
        self.executor.free_but(Leftovers.NONE)
        self.runtime.resident_packs.destroy()
        if self.host_optimizer is not None:
            self.host_optimizer.unwatch_state()
            self.host_optimizer.restore_parameters(self.store.parameters)
            self.masters.give_back_frozen()
            self.host_optimizer.close()
        self.interception.remove()
        self.runtime.installation.remove()
        self.runtime.host_gradients.destroy()
        self.runtime.stash.destroy()
        self.runtime.joins.destroy()
        self.store.release()
        self.device.unlimit_process()
        self.world.leave()
        self.runtime.updater.raise_failure()
