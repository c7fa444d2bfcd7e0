"""Training, saving, loading and comparing an interrupted run with an uninterrupted one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import harmony_ds
from harmony_ds import HarmonyEngine
from harmony_ds.utils import safe_get_full_fp32_param
from tests.engine.drive import adamw, family
from tests.families import Family
from tests.inside import assembly_of


@dataclass(frozen=True)
class Setup:
    """One way to train."""

    family: str = "llama"
    dropout: float = 0.1
    optimizer: Any = adamw  # from parameters to an optimizer; None: the ds_config's
    scheduler: Any = None
    dtype: torch.dtype | None = None  # that parameters are loaded in
    frozen: str | None = None  # parameters whose name contains this
    config: Mapping[str, Any] = field(default_factory=dict)
    harmony: Mapping[str, Any] = field(default_factory=dict)
    accumulation: int = 2

    def other(self, **changes: Any) -> Setup:
        from dataclasses import replace

        return replace(self, **changes)

    @property
    def one(self) -> Family:
        return family(self.family)


def scrambled(model: nn.Module) -> nn.Module:
    """Change the model's state dict, so that a value that is not loaded shows."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1.5).add_(0.01)
    return model


@contextmanager
def engine_of(setup: Setup, fresh: bool = True) -> Any:
    """Yield an engine; `fresh` is False for one that is about to load: nothing in it is what it should be."""
    model = setup.one.build(setup.dropout)
    for parameter in model.parameters() if setup.dtype else ():
        parameter.data = parameter.data.to(setup.dtype)
    if setup.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(setup.frozen not in name)
    if not fresh:
        scrambled(model)
        torch.manual_seed(987)
        random.seed(988)
        np.random.seed(989)
    else:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": setup.accumulation,
        "gradient_clipping": 0.0,
        **setup.config,
        "harmony": {"device": "cpu", **setup.harmony},
    }
    made = None if setup.optimizer is None else setup.optimizer(trained)
    engine, *_ = harmony_ds.initialize(model=model, optimizer=made, lr_scheduler=setup.scheduler, config=config)
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: HarmonyEngine, setup: Setup, steps: Sequence[int], micro_batches: int = 2) -> list[float]:
    """Train one step of `micro_batches` for each of `steps`; a step's number decides its data."""
    losses = []
    for step in steps:
        batches = [setup.one.batch(step * micro_batches + i) for i in range(micro_batches)]
        losses.append(engine.train_batch(iter(batches)).item())
    return losses


def train_and_resume(saved: Setup, resumed: Setup, folder: Path, look: Callable[[HarmonyEngine], Any]) -> list[Any]:
    """Save after two steps; return what `look` sees after two more, there and in a fresh engine that goes on."""
    with engine_of(saved) as engine:
        train(engine, saved, range(2))
        engine.save_checkpoint(folder)
        train(engine, saved, range(2, 4))
        seen = [look(engine)]
    with engine_of(resumed, fresh=False) as engine:
        engine.load_checkpoint(folder)
        train(engine, resumed, range(2, 4))
        return [look(engine), *seen]


def masters_of(engine: HarmonyEngine) -> dict[str, Tensor]:
    """Return the fp32 weights that the optimizer updates, by the names of the weights."""
    found = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    assert found
    return {name: master for name, master in found.items() if master is not None}


def state_of(engine: HarmonyEngine) -> dict[str, Any]:
    """Copy everything that later steps depend on."""
    engine.finish_updates()
    store = assembly_of(engine).store
    state: dict[str, Any] = {f"weight {n}": p.detach().clone() for n, p in engine.module.named_parameters()}
    state |= {f"buffer {n}": b.detach().clone() for n, b in engine.module.named_buffers()}
    state |= {f"master {n}": m.detach().clone() for n, m in store.masters.items()}
    for n, m in store.masters.items():
        for key, value in engine.optimizer.state.get(m, {}).items():
            state[f"{key} {n}"] = value.clone() if isinstance(value, Tensor) else value
    for i, group in enumerate(engine.optimizer.param_groups):
        state |= {f"group {i} {k}": v for k, v in group.items() if k != "params"}
    state["scheduler"] = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    for name in ("global_steps", "global_samples", "skipped_steps", "micro_steps", "cur_scale"):
        state[name] = getattr(engine, name)
    return state | generators()


def generators() -> dict[str, Any]:
    numpy = np.random.get_state()
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (numpy[1].tolist(), *numpy[2:])}


def assert_equal(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare bit for bit."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    wrong = [name for name, value in expected.items() if not same(actual[name], value)]
    assert not wrong, {name: (actual[name], expected[name]) for name in wrong[:3]}


def same(left: Any, right: Any) -> bool:
    if isinstance(right, Tensor):
        return isinstance(left, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    return bool(left == right)


def tag_folder(save_dir: Path) -> Path:
    """Return the folder of the latest checkpoint."""
    return save_dir / (save_dir / "latest").read_text()


def data_folder(save_dir: Path) -> Path:
    """Return the folder with the files of the latest checkpoint."""
    return next(tag_folder(save_dir).glob("data-*"))
