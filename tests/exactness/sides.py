"""The two sides of a case: plain PyTorch in a thin stand-in with the engine's methods, and the engine itself."""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

import harmony_ds
from harmony_ds.reporting.reporter import Reporter
from tests.inside import reporter_of
from tests.oracle import seed_generators

SEED = 5
Weights = dict[str, Tensor]


class Stay(Enum):
    """Ways to stay on the device, and the settings that make it so."""

    NOTHING = ""
    RESIDENT = "resident"
    """All packs, from step to step."""
    GRAPHS = "graphs kept"
    """Packs, and graphs, from forward to backward."""

    @property
    def settings(self) -> dict[str, Any]:
        if self is Stay.GRAPHS:
            return {"residency": "kept", "device_memory_gib": 1.0}
        return {"residency": _MANY if self is Stay.RESIDENT else "off"}


_MANY = 1000  # packs


@dataclass(frozen=True)
class Setting:
    """The part of a ds_config that a case is tried with."""

    accumulation: int
    clipping: float
    stay: Stay = Stay.NOTHING
    harmony: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(
            filter(None, (f"accumulation {self.accumulation}, clipping {self.clipping:g}", self.stay.value))
        )


class Side(ABC):
    """A place for a program to run. `accumulation` and `clipping` are those of the case."""

    def __init__(self, setting: Setting) -> None:
        self.accumulation, self.clipping = setting.accumulation, setting.clipping
        self.models: list[nn.Module] = []

    def initialize(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        accumulation: int | None = None,
        clipping: float | None = None,
        lr_scheduler: Any = None,
        **config: Any,
    ) -> Any:
        """The model's engine. Settings that are left out are those of the case; `config` is the ds_config's rest."""
        self.models.append(model)
        config["gradient_accumulation_steps"] = self.accumulation if accumulation is None else accumulation
        config["gradient_clipping"] = self.clipping if clipping is None else clipping
        return self._engine(model, optimizer, lr_scheduler, config)

    @abstractmethod
    def _engine(self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any, config: dict[str, Any]) -> Any:
        """An engine with this ds_config."""


class EngineSide(Side):
    """Programs run on harmony_ds, on the CPU device."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        harmony = {"device": "cpu", "seed": SEED, "pack_layers": 1, **setting.stay.settings, **setting.harmony}
        self._reporters: list[Reporter] = []
        self._ds_config = {"train_micro_batch_size_per_gpu": 2, "harmony": harmony}

    def _engine(self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any, config: dict[str, Any]) -> Any:
        config = {**self._ds_config, **config}
        engine = harmony_ds.initialize(model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, config=config)[0]
        self._reporters.append(reporter_of(engine))
        return engine

    def swap_ratio(self) -> float:
        """Return how many times the least swaps an engine's last step took: the most of all engines that took one."""
        ratios = [0.0]
        for reporter in self._reporters:
            with contextlib.suppress(RuntimeError):  # no step
                ratios.append(reporter.swap_report().ratio)
        return max(ratios)


class PlainSide(Side):
    """Programs run in plain PyTorch. Keeps what every model's weights were, for the step that they were of."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.engines: list[PlainEngine] = []

    def _engine(self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any, config: dict[str, Any]) -> Any:
        kind = PlainBf16Engine if config.get("bf16") else PlainEngine
        accumulation, clipping = config["gradient_accumulation_steps"], config["gradient_clipping"]
        self.engines.append(kind(model, optimizer, accumulation, clipping, lr_scheduler))
        if not config.get("managed_gradient_accumulation", True):
            self.engines[-1].set_gradient_accumulation_boundary(True)
        return self.engines[-1]

    def finish(self) -> None:
        """Notes the weights that the program ended with."""
        for engine in self.engines:
            engine.remember()


class PlainEngine:
    """Gradient accumulation in plain PyTorch, under the names of the engine's methods."""

    inside_backward = False  # of whichever engine

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, accumulation: int, clipping: float, lr_scheduler: Any
    ) -> None:
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.global_steps = self.micro_steps = 0
        self.history: dict[int, list[Weights]] = {}
        self._accumulation, self._clipping = accumulation, clipping
        self._micro_batch = 0  # of this step
        self._boundary: bool | None = None
        self._norm: float | None = None
        self._inside = 0  # calls of step(): those of the optimizer's class may call those of its base
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        self.remember()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def remember(self) -> None:
        """Notes the weights as possible ones while this many steps were done."""
        now = {name: p.detach().clone() for name, p in self.module.named_parameters() if not lazy(p)}
        self.history.setdefault(self.global_steps, []).append(now)

    # ---- what a loop calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.remember()
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        with self._own_random_numbers():
            return self._divided(self.module(*args, **kwargs))

    forward = __call__

    def _divided(self, outputs: Any) -> Any:
        """`outputs`, whose gradients are divided unless `backward` has divided the loss; tensors as they are."""
        if self._accumulation == 1:
            return outputs
        if isinstance(outputs, Tensor):
            if outputs.grad_fn is not None:
                outputs.register_hook(self._divide)
            return outputs
        return tree_map_only(Tensor, lambda output: self._divided(output.view_as(output)), outputs)

    def _divide(self, gradient: Tensor) -> Tensor:
        return gradient if PlainEngine.inside_backward else gradient / self._accumulation

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        self.remember()
        if scale_wrt_gas:
            loss = loss / self._accumulation
        PlainEngine.inside_backward = True
        try:
            loss.backward(retain_graph=retain_graph)
        finally:
            PlainEngine.inside_backward = False
        return loss.detach()

    def step(self) -> None:
        self.remember()
        if self.is_gradient_accumulation_boundary():
            self._optimizer_step()
        self.micro_steps += 1

    def train_batch(self, data_iter: Iterable[Any], loss_fn: Callable[[Any], Tensor] | None = None) -> Tensor:
        self.remember()
        batches = list(islice(data_iter, self._accumulation))
        losses = []
        for batch in batches:
            with self._own_random_numbers():
                loss = (loss_fn or loss_in)(called(self.module, batch))
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        self._optimizer_step()
        self.micro_steps += len(batches)
        return torch.stack(losses).mean()

    def eval_batch(self, data_iter: Iterable[Any], loss_fn: Callable[[Any], Tensor] | None = None) -> Tensor:
        training = self.module.training
        self.module.eval()
        with torch.no_grad():
            losses = [(loss_fn or loss_in)(called(self.module, b)) for b in islice(data_iter, self._accumulation)]
        self.module.train(training)
        return torch.stack(losses).mean()

    def zero_grad(self) -> None:
        self._micro_batch = 0
        self.module.zero_grad()

    def train(self, mode: bool = True) -> PlainEngine:
        self.module.train(mode)
        return self

    def eval(self) -> PlainEngine:
        return self.train(False)

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._boundary if self._boundary is not None else (self.micro_steps + 1) % self._accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._boundary = is_boundary

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    def get_global_grad_norm(self) -> float | None:
        return self._norm

    def finish_updates(self) -> None:
        """There are none under way."""

    def destroy(self) -> None:
        """There is nothing to destroy."""

    # ---- how

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """The random numbers of a micro-batch, as the engine documents them; the user's are left as they were."""
        pythons, numpys = random.getstate(), np.random.get_state()
        with torch.random.fork_rng():
            seed_generators(harmony_ds.micro_batch_seed(SEED, self.global_steps, self._micro_batch))
            self._micro_batch += 1
            yield
        random.setstate(pythons)
        np.random.set_state(numpys)

    def _optimizer_step(self) -> None:
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.optimizer.zero_grad()

    def _before_step(self, *_: Any) -> None:
        self._inside += 1
        if self._inside == 1:
            self._clip()

    def _after_step(self, *_: Any) -> None:
        self._inside -= 1
        if self._inside == 0:
            self._stepped()

    def _clip(self) -> None:
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        parameters = [p for p in self.module.parameters() if id(p) in trained and p.grad is not None]
        self._norm = nn.utils.get_total_norm([p.grad for p in parameters if not p.grad.is_sparse]).item()
        if self._clipping:
            nn.utils.clip_grad_norm_(parameters, self._clipping)

    def _stepped(self) -> None:
        self.global_steps += 1
        self._micro_batch = 0
        self.remember()


class PlainBf16Engine(PlainEngine):
    """The same with bf16 weights and buffers, fp32 masters, and gradients summed in fp32.

    What the program writes into a weight is its master's value from then on; elements that it did not change keep theirs.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *rest: Any) -> None:
        self._masters = {p: nn.Parameter(p.detach().clone()) for p in model.parameters()}
        model.bfloat16()
        for group in optimizer.param_groups:
            group["params"] = [self._masters[p] for p in group["params"]]
        super().__init__(model, optimizer, *rest)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        result = super().backward(loss, retain_graph, scale_wrt_gas)
        for parameter, master in self._masters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                master.grad = gradient.float() if master.grad is None else master.grad + gradient
        return result

    def _clip(self) -> None:
        for parameter, master in self._masters.items():
            written = parameter.detach() != master.detach().bfloat16()
            master.data = torch.where(written, parameter.detach().float(), master.detach())
        if self._clipping:
            nn.utils.clip_grad_norm_([m for m in self._masters.values() if m.grad is not None], self._clipping)

    def _stepped(self) -> None:
        for parameter, master in self._masters.items():
            parameter.data.copy_(master.detach())
        super()._stepped()


def called(model: nn.Module, batch: Any) -> Any:
    """The model's outputs for a batch in any of the forms that `train_batch` takes."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_in(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, (tuple, list)):
        return outputs[0]
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss


def lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.parameter.UninitializedTensorMixin)
