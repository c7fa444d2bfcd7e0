"""The optimizer step that is open: micro-batches that wait, and the gradients that have gathered so far."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from harmony_ds.calls.intercept import Autocast
from harmony_ds.engine.first_times import DIVIDED_TWICE, EARLY_LOOK, FirstTimes
from harmony_ds.engine.lifetime import while_alive
from harmony_ds.engine.step_gradients import StepGradients
from harmony_ds.engine.training import Training
from harmony_ds.errors import ModelError, UnsupportedError, UsageError
from harmony_ds.offload.updater import Clipping
from harmony_ds.parameters import ParameterLinks
from harmony_ds.stepping.group import GroupParts, StepGroup
from harmony_ds.stepping.model_calls import ModelCalls
from harmony_ds.stepping.output_kinds import OutputKinds
from harmony_ds.stepping.put_forward import PutForward

_logger = logging.getLogger("harmony_ds")


class OpenStep:
    """Its group runs as a whole, or in parts when gradients are wanted before; the model's parameters ask it."""

    def __init__(self, training: Training) -> None:
        self._assembly = assembly = training.assembly
        self._runner = assembly.runner
        self._world = assembly.world
        self._config = config = training.settings.now
        self._counts = training.counts
        self._scaler = scaler = training.scaler
        self._first_times = FirstTimes()
        self._running = False  # the step, or a part of it
        self.gradients = StepGradients(assembly, scaler)
        self.links = ParameterLinks(assembly.store, assembly.host_optimizer, weakref.proxy(self))
        self._parts = GroupParts(
            module=training.model,
            calls=ModelCalls(
                assembly.device,
                assembly.ledger,
                Autocast.of(assembly.device.torch_device.type, config.autocast_dtype),
                casts=config.values["fp16.enabled"] and config.values["fp16.auto_cast"],
            ),
            runner=assembly.runner,
            kinds=OutputKinds(),
            put_forward=PutForward(training.model),
            seed=self._world.first("seed", torch.initial_seed) if config.harmony.seed is None else config.harmony.seed,
            looked=while_alive(self._looked),
            propagating=_refuse_backward if assembly.host_optimizer is None else scaler.check_scaled,
            accumulation=training.settings.gradient_accumulation_steps,
            divided_by_hand=while_alive(self._divided_by_hand),
            propagate=while_alive(self.propagate),
        )
        self.renew()

    def _looked(self) -> None:
        self._first_times.warn(EARLY_LOOK)

    def _divided_by_hand(self) -> None:
        self._first_times.warn(DIVIDED_TWICE)

    # ---- its micro-batches

    @property
    def seed(self) -> int:
        """What the random numbers of its micro-batches are derived from, with the number of the step."""
        return self._parts.seed

    @property
    def calls(self) -> ModelCalls:
        """Calls of the model with arguments on the device."""
        return self._parts.calls

    def renew(self, seed: int | None = None) -> None:
        """Begins a step that nothing is queued for; from now on with `seed`, unless the ds_config names one."""
        if seed is not None and self._config.harmony.seed is None:
            self._parts = replace(self._parts, seed=seed)
        self._parts.runner.end_step()
        self.group = StepGroup(self._parts, self._counts.global_steps)

    def end(self) -> None:
        """Forgets its micro-batches, with the engine."""
        dropped = self.group.propagated_from
        if dropped:
            _logger.warning(
                "destroy() drops the gradients of %d micro-batch%s whose step was not taken: call engine.step() at the "
                "boundary of a group (or engine.set_gradient_accumulation_boundary(True) before it) to use them.",
                dropped,
                "" if dropped == 1 else "es",
            )
        self.group.abandon(destroyed=True)

    def settle(self) -> None:
        """Before the model runs, or is updated: what the user has done to it by hand is taken over.

        Raises:
            ModelError, ModelError: it cannot be.
        """
        if not self.group.is_open:
            self.links.apply_user_writes()
        if self._assembly.interception.adopt_replaced() and self.group.is_open:
            raise ModelError(
                "the forward of a layer was replaced while micro-batches wait that were called before: replace it before "
                "the first micro-batch of a step."
            )

    def run(self) -> bool:
        """Runs the rest of the step; False if there is no gradient at all. The next one is open behind it."""
        try:
            ran = self._run()
        finally:
            self.renew()
        self.links.refresh_aliases()
        return ran

    def _run(self) -> bool:
        """The queued group, and what the user's own backward passes left."""
        optimizer = self._assembly.host_optimizer
        assert optimizer is not None
        hyper, clipping = optimizer.hyper(), self._clipping()
        self.settle()
        if (self._world.size > 1 or self._scaler.scale != 1.0) and self._assembly.parts.own.are_there():
            self._world.refuse(
                "gradients that are put on parameters by hand, or by a backward pass of the program's own"
            )
            raise UnsupportedError(
                "gradients were put on parameters by hand, or by a backward pass of the program's own, while losses are "
                "scaled (fp16): they cannot be told from scaled ones. Add what they are of to the loss, or train in bf16."
            )
        with self._busy():
            return self.group.run(hyper, clipping) or self._runner.update_only(hyper, clipping)

    def propagate(self) -> bool:
        """Runs what is queued and propagated from, so that gradients are there; False if there are none.

        A part of a step: later micro-batches add to them, and `run` uses them.
        """
        optimizer = self._assembly.host_optimizer
        if self._running or optimizer is None or not self.group:
            return False
        if not self.group.wanted:
            return self.group.propagated
        self._world.refuse("looking at gradients, or dropping them, before the step that they are for")
        try:
            with self._busy():
                return self.group.propagate(optimizer.hyper(), self._clipping() or Clipping())
        except BaseException:
            self.group.abandon()
            self.renew()
            self._counts.rewind()
            raise

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """A step, or a part of one, wherever it is asked for: gradients may be read under `torch.no_grad()`."""
        self.gradients.used.check()
        self._running = True
        try:
            with torch.inference_mode(False), torch.enable_grad():
                self.gradients.hide()
                yield
        finally:
            self._running = False

    def _clipping(self) -> Clipping | None:
        config = self._config
        if not config.deferred_update:
            return None
        return Clipping(config.gradient_clipping, self._scaler.scale, config.skip_overflow)

    def zero_grad(self) -> None:
        """Drops the gradients that have gathered since the last step, as plain PyTorch does."""
        self.gradients.used.clear()
        self.gradients.drop(self.propagate())

    # ---- what the model's parameters ask, see `parameters.link.Owner`

    def finish(self) -> None:
        self._assembly.finish_updates()

    def materialize(self, name: str) -> None:
        self._assembly.finish_updates()

    def before_write(self, name: str) -> None:
        """As `propagate`, since the values of `name` are about to be changed.

        Raises:
            UnsupportedError: several processes share them.
            UsageError: a micro-batch is queued that has not been propagated back from.
        """
        self._world.refuse(f"changing {name} by hand, which every process would do again")
        if self._running or not self.group:
            return
        self.propagate()
        if self.group.waits:
            raise UsageError(
                f"{name} is about to be changed, while a micro-batch that was handed over with the values before is still "
                "to be propagated back from: call engine.backward(loss) first, or change parameters behind engine.step()."
            )

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `name`, itself, not scaled: what has gathered since the last step, or was used by it."""
        return self.gradients.read(name, self.propagate())

    def put_gradient(self, name: str, value: Tensor | None) -> None:
        """Uses `value` in the place of what has gathered for `name`."""
        self.gradients.used.drop(name)
        if self.propagate():
            self._runner.executor.gathered.drop((name,))
        if value is not None:
            self.materialize(name)  # behind a pending update, which takes away what is there
        self._assembly.parts.own.put(name, value)


def _refuse_backward() -> None:
    raise UsageError(
        "must provide optimizer during init in order to use backward: name one in the ds_config or pass one. Gradients are "
        "gathered for its parameters alone."
    )
