"""The optimizer and its schedule, under the names by which scripts know them from DeepSpeed."""

from __future__ import annotations

from typing import Any

from harmony_ds.engine.assembly import Assembly
from harmony_ds.engine.loss_scaling import LossScaler
from harmony_ds.engine.schedules import build_scheduler
from harmony_ds.engine.settings import Settings
from harmony_ds.engine.zero_optimizer import ZeroOptimizer, note_overflow
from harmony_ds.errors import UsageError


class TrainedBy:
    """An optimizer, or none; a learning-rate scheduler, or none."""

    def __init__(self, assembly: Assembly, settings: Settings, scaler: LossScaler, lr_scheduler: Any) -> None:
        """`lr_scheduler`: the user's, or what makes it from the optimizer; else it is the ds_config's."""
        self._settings = settings
        self.stepping = stepping = assembly.optimizer
        """The optimizer that steps."""
        self.optimizer = None if stepping is None else ZeroOptimizer(stepping, settings, scaler)
        """It, under DeepSpeed's names."""
        self.lr_scheduler = build_scheduler(settings.now.scheduler, lr_scheduler, stepping)

    def need(self, what: str) -> None:
        """Raises UsageError if there is no optimizer for `what`."""
        if self.optimizer is None:
            raise UsageError(
                f"must provide optimizer during init in order to use {what}: name one in the ds_config or pass one"
            )

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of each parameter group."""
        return self._of_groups("momentum" if self._settings.optimizer_name() in ("SGD", "RMSprop") else "betas")

    def get_type(self) -> list[Any]:
        """The "type" of each parameter group."""
        return self._of_groups("type")

    def _of_groups(self, name: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get(name, 0.0) for group in groups]

    def step_schedule(self, arguments: dict[str, Any]) -> None:
        """Behind an update."""
        if self.lr_scheduler is not None:
            # torch's schedulers look for a sign that the optimizer was stepped first.
            self.stepping._opt_called = True  # type: ignore[union-attr]
            self.lr_scheduler.step(**arguments)

    def note_overflow(self, overflow: bool) -> None:
        """Whether the last step was skipped for inf or NaN in its gradients, as `engine.optimizer` shows it."""
        if self.optimizer is not None:
            note_overflow(self.optimizer, overflow)
