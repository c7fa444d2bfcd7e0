"""Gradients of the program's own are told from those of an update that ends meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from harmony_ds.offload.user_gradients import UserGradients


class Updating:
    """A parameter with a pending update, which the update thread ends right after somebody has read `.grad`."""

    def __init__(self) -> None:
        self.is_updating, self.value = True, torch.ones(2)

    @property
    def grad(self) -> Any:
        value, self.value, self.is_updating = self.value, None, False
        return value

    @grad.setter
    def grad(self, value: Any) -> None:
        self.value = value


def test_a_gradient_whose_update_ends_meanwhile_is_not_the_programs() -> None:
    for ask, answer in ((lambda own: own.exist(), False), (lambda own: own.pop(["w"]), {})):
        parameter = Updating()
        store = SimpleNamespace(parameters={"w": parameter})
        own = UserGradients(store, SimpleNamespace(is_updating=lambda _, p=parameter: p.is_updating))  # type: ignore[arg-type]
        assert ask(own) == answer
        assert own.popped == 0
