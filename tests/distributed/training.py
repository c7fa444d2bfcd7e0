"""A training by several processes, and its reference: plain PyTorch that takes their micro-batches in turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor, nn

import harmony_ds
from harmony_ds.offload.native import make_native
from tests import quantized
from tests.families import FAMILIES
from tests.oracle import loss_in, seed_generators, with_floating_dtype

SEED = 5


@dataclass(frozen=True)
class Training:
    """Settings of a training."""

    model: str = "mlp"
    optimizer: str = "AdamW"
    clip: float = 0.0
    accumulation: int = 2
    steps: int = 3
    bf16: bool = False
    bf16_sums: bool = False  # gradients are added up in bf16
    loop: str = "train_batch"
    harmony: Mapping[str, Any] = field(default_factory=dict)
    disk: tuple[str, ...] = ()  # blocks of the ds_config
    begin: int = 0  # the first step's number, for data


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(19, 19), nn.Dropout(dropout), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(19, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((self.head(x) - y) ** 2).mean()


class LayerDrop(nn.Module):
    """A model that skips two of its four layers in each micro-batch, by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(4))
        self.head = nn.Linear(13, 1)

    def forward(self, x: Tensor) -> Tensor:
        for number in sorted(random.sample(range(4), 2)):
            x = torch.tanh(self.layers[number](x))
        return self.head(x).square().mean()


class Experts(nn.Module):
    """A model with one expert for each value of `which`, so that a micro-batch uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 13)
        self.experts = nn.ModuleList(nn.Linear(13, 13) for _ in range(4))
        self.head = nn.Linear(13, 1)

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.experts[int(which[0])](x))
        return self.head(x).square().mean()


def build(name: str) -> nn.Module:
    if name in ("mlp", "ragged", "experts", "layerdrop"):
        torch.manual_seed(1)
        if name == "layerdrop":
            return LayerDrop()
        return Experts() if name == "experts" else Mlp(0.2 if name == "mlp" else 0.0)
    return quantized.build(name) if name in quantized.KINDS else _family(name).build(0.1)


def _built(training: Training) -> nn.Module:
    """In bf16 with the buffers of batch norms cast, as torch wants them on the CPU: the engine leaves buffers alone."""
    model = build(training.model)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for buffer in (buffer for norm in norms if training.bf16 for buffer in norm.buffers()):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(torch.bfloat16)
    return model


def batch(name: str, number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 + number)
    if name == "mlp":
        return {"x": torch.randn(3, 19, generator=generator), "y": torch.randn(3, 1, generator=generator)}
    if name == "ragged":
        rows = 2 if number % 5 == 3 else 3
        return {"x": torch.randn(rows, 19, generator=generator), "y": torch.randn(rows, 1, generator=generator)}
    if name == "layerdrop":
        return {"x": torch.randn(3, 13, generator=generator)}
    if name == "experts":  # 3 of 4 are used, and by one micro-batch each
        return {"x": torch.randn(3, 13, generator=generator), "which": torch.tensor([number % 3])}
    return quantized.batch(number) if name in quantized.KINDS else dict(_family(name).batch(number))


def data_of(training: Training, number: int) -> dict[str, Any]:
    data = batch(training.model, number)
    return with_floating_dtype(data, torch.bfloat16) if training.bf16 else data


def _family(name: str) -> Any:
    return next(family for family in FAMILIES if family.name == name)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "DeepSpeedCPUAdam": lambda p: make_native("DeepSpeedCPUAdam", list(p), {"lr": 1e-2}),
}


@dataclass
class Result:
    losses: list[list[float]]
    norms: list[float]
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]
    state: dict[str, dict[str, Any]]


def config_of(training: Training, size: int) -> dict[str, Any]:
    return {
        "train_batch_size": 2 * training.accumulation * size,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": training.clip,
        "bf16": {"enabled": training.bf16, "check_grad_overflow": False},
        "data_types": {"grad_accum_dtype": "bf16" if training.bf16_sums else "fp32"},
        "zero_optimization": {
            "stage": 2,
            **{block: {"device": "nvme", "nvme_path": gettempdir()} for block in training.disk},
        },
        "harmony": {"seed": SEED, "pack_layers": 2, "device": "cpu", **training.harmony},
    }


def engine_of(training: Training, **arguments: Any) -> Any:
    import torch.distributed as dist

    size = dist.get_world_size() if dist.is_initialized() else 1
    model = _built(training)
    optimizer = OPTIMIZERS[training.optimizer](model.parameters())
    config = config_of(training, size)
    engine, *_ = harmony_ds.initialize(model=model, optimizer=optimizer, config=config, **arguments)
    return engine


def train(training: Training) -> Result:
    """In one of several processes."""
    engine = engine_of(training)
    result = train_with(engine, training)
    asked = training.harmony.get("micro_batch")
    assert asked == "auto" or engine.plan.policy.joined_count == (training.accumulation if asked else 1)
    engine.destroy()
    return result


def train_with(engine: Any, training: Training) -> Result:
    rank, size = engine.global_rank, engine.world_size
    losses, norms = [], []
    for step in range(training.begin, training.begin + training.steps):
        numbers = [number_of(training, size, rank, step, i) for i in range(training.accumulation)]
        batches = [data_of(training, number) for number in numbers]
        if training.loop == "train_batch":
            losses.append([float(engine.train_batch(batches))])
        else:
            losses.append([])
            pending = []
            for i, one in enumerate(batches):
                freeze(engine.module, training, i)
                loss = loss_in(engine(**one))
                if training.loop == "one looks" and rank == step % size:  # and the others do not
                    loss.item()
                engine.backward(loss)
                engine.step()
                pending.append(loss)
            freeze(engine.module, training, 0)
            losses[-1] = [float(loss) for loss in pending]
        norms.append(engine.get_global_grad_norm())
    return Result(losses, norms, *state_tensors(engine))


def freeze(model: nn.Module, training: Training, i: int) -> None:
    """Freeze the head for every second micro-batch, in a loop that does."""
    if training.loop == "freezes":
        model.head.requires_grad_(i % 2 == 0)  # type: ignore[operator]


def number_of(training: Training, size: int, rank: int, step: int, i: int) -> int:
    """Return the seed of a micro-batch's data: in the order in which one process would take them."""
    return (step * training.accumulation + i) * size + rank


def state_tensors(engine: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return copies of weights, masters and optimizer state."""
    from harmony_ds.utils import safe_get_full_fp32_param

    names = dict(engine.module.named_parameters())
    weights = {name: picklable(p.detach().clone()) for name, p in names.items()}
    masters = {name: safe_get_full_fp32_param(p) for name, p in names.items() if p.requires_grad}
    trained = [name for name, p in names.items() if p.requires_grad]  # frozen ones are in no group of the engine's
    state = {}
    for index, values in engine.optimizer.state_dict()["state"].items():
        state[trained[index]] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
    return weights, masters, state


def picklable(tensor: Tensor) -> Tensor:
    """Return the same numbers in a dtype that pickles can hold, which float8 is not."""
    return tensor.float() if tensor.dtype is torch.float8_e4m3fn else tensor


def _summed(several: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for gradients in several:
        for name, gradient in gradients.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def train_plainly(training: Training, size: int, servers: Sequence[Sequence[int]] | None = None) -> list[Result]:
    """Train in plain PyTorch as every rank should.

    Gradients are added up for each rank, then in the order of the ranks of each server, then in that of the servers.

    Args:
        servers: the ranks of each server's processes (None: there is one server).
    """
    servers = [range(size)] if servers is None else servers
    model = _built(training)
    parameters = dict(model.named_parameters())
    masters = parameters
    if training.bf16:
        masters = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        for p in parameters.values():
            p.data = p.data.to(torch.bfloat16)
    sum_dtype = torch.bfloat16 if training.bf16_sums else torch.float32
    optimizer = OPTIMIZERS[training.optimizer](masters.values())
    losses: list[list[list[float]]] = [[] for _ in range(size)]
    norms: list[float] = []
    for step in range(training.begin + training.steps):
        of_ranks: list[dict[str, Tensor]] = []
        of_step = []
        for rank in range(size):
            sums: dict[str, Tensor] = {}
            seen = []
            for i in range(training.accumulation):
                data = data_of(training, number_of(training, size, rank, step, i))
                seed_generators(harmony_ds.micro_batch_seed(SEED, step, i * size + rank))
                freeze(model, training, i)
                loss = loss_in(model(**data))
                (loss / training.accumulation).backward()
                seen.append(loss.detach())
                for name, p in parameters.items():
                    if p.grad is not None:
                        gradient = p.grad.to(sum_dtype)
                        sums[name] = sums[name] + gradient if name in sums else gradient
                        p.grad = None
            freeze(model, training, 0)
            of_step.append(seen)
            of_ranks.append(sums)
        total = _summed([_summed([of_ranks[rank] for rank in ranks]) for ranks in servers])
        squares = torch.zeros((), dtype=torch.float64)
        for name, value in total.items():
            total[name] = (value / size).float()
            squares += total[name].double().square().sum()
        norm = squares.sqrt().float()
        coefficient = torch.clamp(training.clip / (norm + 1e-6), max=1.0) if training.clip else None
        for name, p in masters.items():
            p.grad = None if name not in total else total[name] if coefficient is None else total[name] * coefficient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if training.bf16:
            for name, p in parameters.items():
                p.data.copy_(masters[name].data)
        if step >= training.begin:
            norms.append(norm.item())
            means = [torch.stack(seen).mean() for seen in of_step]
            mean = sum(means[1:], means[0]) / size
            for rank in range(size):
                own = [float(loss) for loss in of_step[rank]]
                losses[rank].append([float(mean)] if training.loop == "train_batch" else own)
    names = list(parameters)
    state = {names[index]: values for index, values in optimizer.state_dict()["state"].items()}
    own = {name: master for name, master in masters.items() if parameters[name].requires_grad}
    weights = {name: picklable(parameter) for name, parameter in parameters.items()}
    return [Result(losses[rank], norms, weights, own, state) for rank in range(size)]


def train_all(several: Sequence[Training]) -> list[Result]:
    """One after another, each with an engine of its own."""
    return [train(training) for training in several]


def differences(found: Sequence[Result], right: Sequence[Result], relative: float = 0.0) -> list[str]:
    """Describe the tensors that differ in any bit; empty: none does.

    Args:
        relative: allowed difference, relative to the largest number of a tensor, or to a hundredth if that is less (the
            gradients of some biases are nothing but rounding); 0: none.
    """
    told = []
    for rank, (a, b) in enumerate(zip(found, right, strict=True)):
        told += [] if _close(a.losses, b.losses, relative) else [f"rank {rank}: losses {a.losses} and not {b.losses}"]
        told += [] if _close(a.norms, b.norms, relative) else [f"rank {rank}: norms {a.norms} and not {b.norms}"]
        for what in ("weights", "masters"):
            mine, theirs = getattr(a, what), getattr(b, what)
            told += [f"rank {rank}: {what} {n}" for n, v in theirs.items() if not _close(mine[n], v, relative)]
        if set(a.state) != set(b.state):
            told.append(f"rank {rank}: state of {sorted(a.state)} and not {sorted(b.state)}")
        for index in set(a.state) & set(b.state):
            for key, value in b.state[index].items():
                same = _close(a.state[index].get(key), value, relative)
                told += [] if same else [f"rank {rank}: state {index}.{key}"]
    return told


def _close(mine: Any, theirs: Any, relative: float) -> bool:
    if (isinstance(theirs, list) and not theirs) or (not relative and not isinstance(theirs, Tensor)):
        return bool(mine == theirs)
    if theirs is None or mine is None:
        return mine is theirs
    a, b = torch.as_tensor(mine).detach(), torch.as_tensor(theirs).detach()
    if not relative:
        return torch.equal(a, b)
    return bool((a.float() - b.float()).abs().max() <= relative * b.float().abs().max().clamp(min=1e-2))
