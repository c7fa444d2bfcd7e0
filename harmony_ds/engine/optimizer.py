"""The optimizer and its schedule, under the names by which scripts know them from DeepSpeed."""

from __future__ import annotations

from typing import Any

from harmony_ds.assembly import Assembly
from harmony_ds.engine.settings import Settings
from harmony_ds.errors import NoOptimizerError
from harmony_ds.schedules import build_scheduler


class TrainedBy:
    """An optimizer, or none; a learning-rate scheduler, or none."""

    def __init__(self, assembly: Assembly, settings: Settings, lr_scheduler: Any) -> None:
        """`lr_scheduler`: the user's, or what makes it from the optimizer; else it is the ds_config's."""
        self._runner = assembly.runner
        self._settings = settings
        self.optimizer = assembly.optimizer
        self.lr_scheduler = build_scheduler(settings.now.scheduler, lr_scheduler, self.optimizer)

    def need(self, what: str) -> None:
        """Raises NoOptimizerError if there is no optimizer for `what`; UsageError behind `destroy`."""
        self._runner.check_alive()
        if self.optimizer is None:
            raise NoOptimizerError(
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
            self.optimizer._opt_called = True  # type: ignore[union-attr]
            self.lr_scheduler.step(**arguments)

    def tell(self, overflow: bool, scale: float) -> None:
        """Keeps what scripts read from DeepSpeed's optimizer wrapper on the optimizer itself.

        Args:
            overflow: the last step was skipped.
            scale: of losses, now.
        """
        if self.optimizer is None:
            return
        scales = self._settings.now.loss_scale
        dynamic = scales is not None and scales.static == 0
        told = {"overflow": overflow, "cur_scale": scale, "loss_scale": scale, "dynamic_loss_scale": dynamic}
        for name, value in told.items():
            setattr(self.optimizer, name, value)
