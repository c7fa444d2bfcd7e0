"""Optimizer steps from gradients that are all there: nothing is under way when they return."""

from __future__ import annotations

from harmony_ds.offload.host_optimizer import Hyper
from harmony_ds.offload.updater import Clipping
from harmony_ds.runtime.gathered import GatheredGradients
from harmony_ds.runtime.outcome import Outcome
from harmony_ds.runtime.parts import Parts


def step_whole(parts: Parts, gathered: GatheredGradients, clipping: Clipping, outcome: Outcome) -> None:
    """The optimizer's own `step` over all gradients that have gathered, and have left the device."""
    optimizer, updater = parts.optimizer, parts.updater
    assert optimizer is not None and updater is not None
    names = tuple(optimizer.trained)
    gathered.to_host()
    parts.device_store.drop()
    gathered.receive_own(names)
    updater.measure(names)
    outcome.norm = updater.norm(clipping)
    norm = outcome.norm.result()
    gradients = updater.take(names)
    if clipping.skip_overflow and norm.overflow:
        outcome.overflow = True
        return
    if norm.coefficient is not None:
        for gradient in gradients.values():
            gradient.mul_(norm.coefficient)
    outcome.updates_issued = 1  # from here on, nobody knows what has been changed
    optimizer.step_whole(gradients, lambda: parts.follow_masters(gradients))


def update_own(
    parts: Parts, gathered: GatheredGradients, hyper: Hyper, clipping: Clipping | None, outcome: Outcome
) -> None:
    """Updates from what the user's own backward passes left on host parameters, and nothing else."""
    optimizer, updater = parts.optimizer, parts.updater
    assert optimizer is not None and updater is not None
    if optimizer.steps_whole:
        step_whole(parts, gathered, clipping or Clipping(), outcome)
        return
    names = tuple(optimizer.trained)
    updater.wait_all()
    parts.device_store.drop()
    gathered.receive_own(names)
    if clipping is not None:
        updater.measure(names)
        outcome.norm = updater.norm(clipping)
    outcome.updates_issued = 1
    updater.update(0, names, hyper, outcome.norm)
    updater.wait_all()
