"""Parameters that are exchanged or changed under the engine."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from tests.exactness.case import ALL, PAIRS, REGROUPED, Found, Tolerance, case
from tests.exactness.models import (
    CLASSES,
    WIDTH,
    Block,
    Net,
    Slow,
    adamw,
    batches,
    changed_between_steps,
    evaluated,
    of_logits,
    own_loss,
    seen_after_steps,
    sgd,
    slow,
    train,
    trained,
    under,
    weights,
)
from tests.exactness.sides import Setting, Side, Stay

# ---- other tensors in the place of the engine's


@case()
def data_replaced(side: Side) -> Found:
    """`p.data = p.data * 0.5` for every parameter between two steps."""
    model = Net()

    def halve() -> None:
        for p in model.parameters():
            p.data = p.data * 0.5

    return changed_between_steps(side, model, halve)


class Logarithms(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.log()


@case()
def weight_assigned_through_a_parametrization(side: Side) -> Found:
    """`linear.weight = value` of a parametrized weight, and `p.set_(p * 0.5)` of another parameter, between two steps."""
    model = Net()
    linear = model.blocks[0].linear
    linear.weight.data.abs_()
    parametrize.register_parametrization(linear, "weight", Logarithms())

    def assign() -> None:
        with torch.no_grad():
            linear.weight = torch.full_like(linear.weight, 0.5)
            model.head.bias.set_(model.head.bias * 0.5)

    return changed_between_steps(side, model, assign)


@case()
def load_state_dict(side: Side) -> Found:
    """A state dict that was copied at the start is loaded after a step."""
    model = Net()
    start = copy.deepcopy(model.state_dict())
    return changed_between_steps(side, model, lambda: model.load_state_dict(start))


@case()
def state_dict_kept(side: Side) -> Found:
    """`state = model.state_dict()` is taken once, not copied, and read after each step: it is alive in plain PyTorch."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    state = model.state_dict()
    seen = {}
    for step in range(2):
        train(engine, batches(side.accumulation, seed=step))
        seen |= {f"{name} after {step}": t.clone() for name, t in state.items()}
    return seen


@case()
def module_replaced(side: Side) -> Found:
    """A block is replaced by a new, untrained one between two steps."""
    model = Net()
    return changed_between_steps(side, model, lambda: model.blocks.__setitem__(1, Block()))


@case()
def module_removed(side: Side) -> Found:
    """The last block is deleted between two steps."""
    model = Net()
    return changed_between_steps(side, model, lambda: model.blocks.__delitem__(-1), steps=2)


@case()
def forward_patched(side: Side) -> Found:
    """`block.forward` is replaced by another function between two steps."""
    model = Net()
    block = model.blocks[1]

    def forward(x: Tensor) -> Tensor:
        return x + block.linear(x)

    return changed_between_steps(side, model, lambda: setattr(block, "forward", forward), steps=2)


@case()
def forward_of_a_class_patched(side: Side) -> Found:
    """`Block.forward` is replaced by another function between two steps, for all blocks."""
    patched = type("Patched", (Block,), {})

    def forward(self: Any, x: Tensor) -> Tensor:
        return x + self.linear(x)

    return changed_between_steps(side, Net(patched), lambda: setattr(patched, "forward", forward), steps=2)


@case()
def statistics_updated_within_a_step(side: Side) -> Found:
    """BatchNorm is frozen (eval) but for one pass under no_grad within a group, which updates its statistics."""
    model = Net(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()))
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]

    def freeze() -> None:
        for norm in norms:
            norm.eval()

    freeze()
    engine = side.initialize(model, sgd(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        if i == side.accumulation + 1:
            model.train()
            with torch.no_grad():
                engine(2 * x, y)
            freeze()
    return weights(model)


@case()
def dropout_exchanged_and_a_call_in_eval_mode(side: Side) -> Found:
    """A block gets another dropout between two steps; then one micro-batch of a group is called in eval mode."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    train(engine, batches(side.accumulation))
    model.blocks[1].dropout = nn.Dropout(0.5)
    for i, (x, y) in enumerate(batches(2 * side.accumulation, seed=2)):
        model.train(i % 4 != 2)
        loss = engine(x, y)
        model.train()
        engine.backward(loss)
        engine.step()
    return weights(model)


@case(Setting(4, 0.0), Setting(4, 0.0, Stay.RESIDENT))
def trained_again_after_an_engine_that_froze_it(side: Side) -> Found:
    """A block is frozen for a first engine; a second one trains it, with the same optimizer, which has had state of it."""
    model = Net()
    optimizer = adamw(model)
    for x, y in batches(2):
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.blocks[1].requires_grad_(False)
    engine = side.initialize(model, optimizer)
    train(engine, batches(side.accumulation))
    engine.destroy()
    model.requires_grad_(True)
    engine = side.initialize(model, optimizer)
    losses = train(engine, batches(2 * side.accumulation, seed=2))
    numbers = [number for group in optimizer.state_dict()["param_groups"] for number in group["params"]]
    return {**weights(model), "losses": losses, "parameters": torch.tensor(len(numbers))}


class Labelled(Net):
    """Gives logits of rows with a label above 1 alone."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        return self.head(self.body(x))[labels > 1]


@case()
def outputs_of_as_many_rows_as_the_data_says(side: Side) -> Found:
    """The number of rows that forward returns depends on labels, and the loop makes a loss of them by itself."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        logits = engine(x, labels)
        return logits.square().sum() + logits.mean()

    return trained(side, Labelled(), adamw, loss, rows=6)


class Averaging(Block):
    """Subtracts a running mean, if it has a buffer for one."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if "mean" not in self._buffers:
            return x
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


@case()
def buffer_registered_between_steps(side: Side) -> Found:
    """A block gets a buffer between two steps, which its forward changes and reads from then on."""
    model = Net(Averaging)
    return changed_between_steps(
        side, model, partial(model.blocks[1].register_buffer, "mean", torch.zeros(WIDTH)), steps=2
    )


class Configured(Block):
    """Reads settings that it shares with others."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x - x.mean(0) if self.config.centres else self.config.scale * x


@case()
def configuration_changed_between_steps(side: Side) -> Found:
    """Entries of `model.config` are changed between two steps."""
    config = SimpleNamespace(centres=False, scale=1.0)
    model = Net(lambda: Configured(config))
    model.config = config
    return changed_between_steps(side, model, lambda: vars(config).update(centres=True), steps=2)


@case()
def configuration_changed_within_a_step(side: Side) -> Found:
    """`model.config.scale` is another number for each micro-batch."""
    config = SimpleNamespace(centres=False, scale=1.0)

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        config.scale = 1.0 + engine.micro_steps % side.accumulation
        return engine(x, labels)

    return trained(side, Net(lambda: Configured(config)), adamw, loss)


@case()
def dtype_of_outputs_under_another_autocast(side: Side) -> Found:
    """The loop asks for the dtype of logits, which is another one in steps under autocast."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        with torch.autocast("cpu", torch.bfloat16, enabled=i // side.accumulation == 1):
            logits = engine(x)
        loss = F.cross_entropy(logits if logits.dtype == torch.float32 else 2 * logits.float(), y)
        engine.backward(loss)
        engine.step()
    return weights(model)


def redirected(engine: Any, model: nn.Module, method: Callable[..., Any], *args: Any) -> Any:
    """Calls `method` by way of the engine, as `_ForwardRedirection` of Lightning and TRL does."""
    own = model.forward

    def forward(*given: Any) -> Any:
        model.forward = own
        return method(*given)

    model.forward = forward
    return engine(*args)


class Stepping(Net):
    def training_step(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": 3 * self(x, labels) + self(-x, labels)}


@case(*ALL, tolerance=REGROUPED)
def forward_of_the_model_redirected(side: Side) -> Found:
    """Each call is redirected to `training_step`, which calls the model itself; between steps the model is evaluated."""
    model = Stepping()
    engine = side.initialize(model, adamw(model))
    losses, evaluated = [], []
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        losses.append(redirected(engine, model, model.training_step, x, y)["loss"])
        engine.backward(losses[-1])
        engine.step()
        if i % side.accumulation == side.accumulation - 1:
            with torch.no_grad():
                evaluated.append(engine(x, y))
    return {
        **weights(model),
        "losses": torch.stack([loss.detach() for loss in losses]),
        "evaluated": torch.stack(evaluated),
    }


# ---- what is trained


@case(*ALL)
def backbone_frozen_for_a_step(side: Side) -> Found:
    """All but the head is frozen before the second step, and thawed before the third."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for step in range(4):
        model.requires_grad_(step != 1)
        model.head.requires_grad_(True)
        for x, y in batches(side.accumulation, seed=step):
            engine.backward(engine(x, y))
            engine.step()
    return weights(model)


@case(*ALL)
def blocks_frozen_for_every_second_micro_batch(side: Side) -> Found:
    """`model.blocks.requires_grad_(i % 2 == 0)` before micro-batch i; a hook scales one of their gradients."""
    model = Net()
    model.blocks[1].linear.weight.register_hook(lambda gradient: 2 * gradient)

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        model.blocks.requires_grad_(engine.micro_steps % 2 == 0)
        return engine(x, labels)

    return trained(side, model, adamw, loss)


@case(*ALL)
def frozen_before_backward(side: Side) -> Found:
    """The head is frozen after every second forward and thawed after backward: in plain PyTorch it gets no gradient."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        loss = engine(x, y)
        if i % 4 == 3:
            loss.item()
        model.head.requires_grad_(i % 2 == 0)
        engine.backward(loss)
        model.head.requires_grad_(True)
        engine.step()
    return weights(model)


@case(*PAIRS, tolerance=REGROUPED)
def frozen_after_backward(side: Side) -> Found:
    """The head is frozen between backward, of a loss of two forwards, and step, which runs another forward; BatchNorm."""
    model = Net(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    engine = side.initialize(model, sgd(model))
    data = iter(batches(3 * side.accumulation, rows=4))
    for _ in range(side.accumulation):
        one, other = (own_loss(engine, *next(data)) for _ in range(2))
        engine.backward((one - other).square() + one)
        kept = own_loss(engine, *next(data))
        model.head.requires_grad_(False)
        engine.step()
        model.head.requires_grad_(True)
    return {**weights(model), "loss": kept}


@case(*PAIRS)
def frozen_between_two_backward_passes(side: Side) -> Found:
    """The front is trained by the first of two losses of the same outputs, and frozen for the second."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(2 * side.accumulation):
        logits = engine(x)
        engine.backward(F.cross_entropy(logits, y), retain_graph=True)
        model.front.requires_grad_(False)
        engine.backward(logits.square().mean())
        model.front.requires_grad_(True)
        engine.step()
    return weights(model)


@case()
def optimizer_of_some_parameters(side: Side) -> Found:
    """The optimizer was given the head's parameters alone, and nothing is frozen."""
    return trained(side, Net(), lambda model: adamw(model.head), steps=3)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, CLASSES)
        self.use_spare = False

    def forward(self, x: Tensor, labels: Tensor | None = None, spare: bool = False) -> Tensor:
        logits = (self.spare if spare else self.head)(self.body(x))
        return logits if labels is None else F.cross_entropy(logits, labels)


@case()
def heads_in_turn(side: Side) -> Found:
    """Two tasks in turn, each with a head of its own, a step each."""
    return heads(side, a_head=side.accumulation, steps=4)


@case()
def heads_in_turn_within_a_group(side: Side) -> Found:
    """Two tasks in turn, each with a head of its own, a micro-batch each."""
    return heads(side, a_head=1, steps=2)


def heads(side: Side, a_head: int, steps: int) -> Found:
    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        return engine(x, labels=labels, spare=engine.micro_steps // a_head % 2 == 1)

    return trained(side, Unused(), adamw, loss, steps)


# ---- aliases


@case()
def parameters_listed_once(side: Side) -> Found:
    """`ps = list(model.parameters())` is taken once and read after each step."""
    model = Net()
    ps = list(model.parameters())
    return seen_after_steps(side, model, lambda _: torch.stack([p.detach().sum() for p in ps]), slow)


@case()
def listed_parameters_written(side: Side) -> Found:
    """`ps = list(model.parameters())` is taken once and decayed by hand after each step."""
    model = Net()
    engine = side.initialize(model, slow(model))
    ps = list(model.parameters())
    for step in range(3):
        train(engine, batches(side.accumulation, seed=step))
        with torch.no_grad():
            for p in ps:
                p.mul_(0.9)
    return weights(model)


def in_one_memory(model: nn.Module) -> Tensor:
    """Return a flat tensor that the parameters of `model` are parts of, from now on."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    return flat


@case(*PAIRS)
def parameters_in_one_memory(side: Side) -> Found:
    """All parameters are parts of one flat tensor."""
    model = Net()
    in_one_memory(model)
    return trained(side, model)


@case(*PAIRS)
def weights_tied_by_data(side: Side) -> Found:
    """`model.head.weight.data = model.front.weight.data[:5]`: two parameters, some of whose memory is the same."""
    model = Net()
    model.head.weight.data = model.front.weight.data[:CLASSES]
    return trained(side, model, sgd)


# ---- written in place


@case()
def weights_averaged_and_swapped_in(side: Side) -> Found:
    """An exponential average of the weights is swapped in for an evaluation, and the trained ones back."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = []
    for step in range(3):
        train(engine, batches(side.accumulation, seed=step))
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p, 0.1)
            kept = {name: p.clone() for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.copy_(average[name])
            seen.append(engine(batches(1)[0][0]))
            for name, p in model.named_parameters():
                p.copy_(kept[name])
    return {**weights(model), **{f"average {n}": t for n, t in average.items()}, "seen": torch.stack(seen)}


# ---- kinds of parameters


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.scale


class Described(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = Scaled(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.body(x)) * self.head.weight.scale
        return F.cross_entropy(logits if self.front.weight.requires_grad else 2 * logits, labels)


@case(*PAIRS)
def attributes_of_parameters(side: Side) -> Found:
    """A layer and the code after it read `weight.scale` (as mup does), that code `weight.requires_grad`; both change."""
    model = Described()

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        step = engine.micro_steps // side.accumulation
        model.head.weight.scale = 0.5 + step
        model.front.requires_grad_(step != 1)
        return engine(x, labels)

    return trained(side, model, sgd, loss, steps=4)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.05))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight.float() * self.scale[:, None]))


@case()
def int8_parameters(side: Side) -> Found:
    """Blocks with frozen int8 weights and trained scales."""
    return trained(side, Net(Quantized))


class Embedded(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH, **options)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(self.embed(x), labels)


@case(Setting(4, 0.0))
def sparse_embedding(side: Side) -> Found:
    """nn.Embedding(sparse=True) with SGD."""
    return trained(side, Embedded(sparse=True), sgd, lambda engine, _, y: F.cross_entropy(engine(y), y))


@case()
def padded_embedding(side: Side) -> Found:
    """nn.Embedding with padding_idx and max_norm, which rescales rows in forward."""
    model = Embedded(padding_idx=0, max_norm=1.0)
    return trained(side, model, adamw, lambda engine, _, y: F.cross_entropy(engine(y), y))


@case()
def lazy_modules(side: Side) -> Found:
    """nn.LazyLinear in the blocks, not yet called when the engine is made; SGD is made for them before, as torch allows."""

    def block() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh())

    return trained(side, Net(block), sgd)


@case()
def parameters_in_a_plain_list(side: Side) -> Found:
    """Parameters in an ordinary Python list, which the optimizer gets by hand and modules do not know."""

    class Plain(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [nn.Parameter(torch.ones(WIDTH))]

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            return super().forward(x * self.scales[0], labels)

    model = Plain()
    optimizer = torch.optim.SGD([*model.parameters(), *model.scales], lr=0.1)
    return {**trained(side, model, lambda _: optimizer), "scale": model.scales[0]}


@case(
    tolerance=Tolerance(1e-6, "the engine holds weights in the order of rows, and kernels add in the order of strides")
)
def weight_not_contiguous(side: Side) -> Found:
    """A weight is a transposed view: `nn.Parameter(w.t())`."""
    model = Net()
    for block in model.blocks:
        block.linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    return trained(side, model, sgd)


@case()
def weight_norm_by_hooks(side: Side) -> Found:
    """The older torch.nn.utils.weight_norm, a forward pre-hook, in every block."""
    return trained(side, Net(lambda: under(nn.utils.weight_norm)))


@case(*PAIRS)
def pruned_layer(side: Side) -> Found:
    """torch.nn.utils.prune of the head, a layer by itself, whose hook makes its weight; losses of both kinds in turn."""
    model = Net()
    prune.l1_unstructured(model.head, "weight", 0.4)
    prune.l1_unstructured(model.head, "bias", 1)

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        return (own_loss if engine.micro_steps % 2 else of_logits)(engine, x, labels)

    return trained(side, model, sgd, loss, steps=3)


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH))
        self.b = nn.Parameter(torch.zeros(WIDTH, 2))
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        return out if self.merged else out + x @ self.a.T @ self.b.T


@case(tolerance=REGROUPED)
def adapters_merged_and_unmerged(side: Side) -> Found:
    """Low-rank adapters are merged into frozen weights (`weight.data += b @ a`) for an evaluation, and taken out again."""
    model = Net(LoRA)

    def merge(sign: int) -> None:
        for block in model.blocks:
            block.base.weight.data += sign * block.b.data @ block.a.data
            block.merged = sign > 0

    def evaluate(engine: Any) -> Tensor:
        merge(1)
        seen = evaluated(engine)
        merge(-1)
        return seen

    return seen_after_steps(side, model, evaluate, sgd, steps=2)


# ---- bf16


def bf16(side: Side, changes: Sequence[Callable[[Tensor], object]], model: nn.Module | None = None) -> Found:
    """Trains in bf16 with fp32 masters, a step for each of `changes`, which is then done to every weight."""
    model = model or Net()
    engine = side.initialize(model, adamw(model), bf16={"enabled": True})
    for step, change in enumerate(changes):
        train(engine, [(x.bfloat16(), y) for x, y in batches(side.accumulation, seed=step)])
        for p in model.parameters():
            change(p)
    return weights(model)


@case()
def bf16_buffers(side: Side) -> Found:
    """Blocks in bf16 multiply by a float32 buffer in their own dtype; buffers keep theirs, as with DeepSpeed."""

    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.rand(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale.to(x.dtype))

    model = Net(Scaled)
    bf16(side, [lambda p: None] * 3, model)
    return {name: p for name, p in weights(model).items() if not name.endswith("scale")}


@case()
def bf16_clamped_by_hand(side: Side) -> Found:
    """bf16 weights are clamped after each step; plain PyTorch has them in fp32 and rounds, and clamps both."""
    return bf16(side, [lambda p: p.data.clamp_(-0.125, 0.125)] * 3)


@case()
def bf16_written_by_hand_in_turn(side: Side) -> Found:
    """bf16 weights are written after each step by `data =`, `data.copy_`, nn.init, and data that are put aside and back."""

    def put_aside(p: Tensor) -> None:
        with torch.no_grad():
            p.mul_(0.5)
        kept, p.data = p.data, torch.zeros_like(p.data)
        assert not p.any()
        p.data = kept

    def assign(p: Tensor) -> None:
        p.data = p.data / 2

    return bf16(side, [assign, lambda p: p.data.copy_(-p.data), lambda p: nn.init.constant_(p, 0.25), put_aside] * 2)


@case()
def bf16_written_between_backward_and_step(side: Side) -> Found:
    """bf16 weights are written after the backward pass of each micro-batch, and before its step."""
    model = Net()
    engine = side.initialize(model, sgd(model), bf16={"enabled": True})
    for number, (x, y) in enumerate(batches(2 * side.accumulation)):
        engine.backward(engine(x.bfloat16(), y))
        with torch.no_grad():
            model.head.weight.fill_(0.25 + number / 8)
        engine.step()
    return weights(model)


# ---- the optimizer's own


@case()
def learning_rate_within_a_group(side: Side) -> Found:
    """`group["lr"] = ...` before every micro-batch; the last one counts."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        engine.optimizer.param_groups[0]["lr"] = 1e-3 * (engine.micro_steps + 1)
        return of_logits(engine, x, labels)

    return trained(side, Net(), adamw, loss)


@case(*ALL)
def hyper_parameters_written_in_place(side: Side) -> Found:
    """`lr` is a tensor and `betas` a list, and both are written into right after each step."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    group = optimizer.param_groups[0]
    group["betas"] = [0.9, 0.999]

    def lower(_: Any) -> Tensor:
        group["lr"].mul_(0.5)
        group["betas"][0] *= 0.5
        return group["lr"].clone()

    return seen_after_steps(side, model, lower, lambda _: optimizer)


@case()
def scheduler_by_hand(side: Side) -> Found:
    """scheduler.step() is called by the loop at each boundary, not by the engine."""
    return scheduled(side, by_engine=False)


@case(*ALL)
def scheduler_given_to_the_engine(side: Side) -> Found:
    """`lr_scheduler=scheduler` is given to initialize, and the engine steps it."""
    return scheduled(side, by_engine=True)


def scheduled(side: Side, by_engine: bool) -> Found:
    model = Net()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    engine = side.initialize(model, optimizer, lr_scheduler=scheduler if by_engine else None)
    for step in range(3):
        train(engine, batches(side.accumulation, seed=step))
        if not by_engine:
            scheduler.step()
    return {**weights(model), "lr": scheduler.get_last_lr()[0]}


@case()
def momenta_zeroed(side: Side) -> Found:
    """`state["exp_avg"].zero_()` for every parameter between two steps."""
    model = Net()
    optimizer = adamw(model)

    def zero() -> None:
        for p in model.parameters():
            optimizer.state[p]["exp_avg"].zero_()

    return changed_between_steps(side, model, zero, optimizer)


@case(*ALL)
def adapters_merged_and_begun_anew(side: Side) -> Found:
    """ReLoRA: after two steps adapters are added to frozen weights in place, drawn anew, and their state is weakened."""
    model = Net(LoRA)
    adapters = [p for block in model.blocks for p in (block.a, block.b)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = side.initialize(model, optimizer)
    for step in range(3):
        train(engine, batches(2 * side.accumulation, seed=step))
        with torch.no_grad():
            for block in model.blocks:
                block.base.weight.add_(block.b @ block.a)
                block.a.normal_()
                block.b.zero_()
            for p in adapters:
                optimizer.state[p]["exp_avg"].mul_(0.1)
                optimizer.state[p]["exp_avg_sq"].mul_(0.01)
    return weights(model)


@case()
def optimizer_state_loaded(side: Side) -> Found:
    """optimizer.state_dict() is copied after a step and loaded after the next."""
    model = Net()
    optimizer = adamw(model)
    engine = side.initialize(model, optimizer)
    train(engine, batches(side.accumulation))
    state = copy.deepcopy(optimizer.state_dict())
    train(engine, batches(side.accumulation, seed=2))
    optimizer.load_state_dict(state)
    train(engine, batches(side.accumulation, seed=3))
    return weights(model)


class SlowMomentum(Slow):
    """Updates that are still under way when step() has returned."""

    elementwise = True


@case(Setting(4, 0.0), Setting(1, 1.0))
def optimizer_state_replaced(side: Side) -> Found:
    """`optimizer.state = defaultdict(dict)` right after each step: momenta begin anew."""
    model = Net()
    optimizer = SlowMomentum(model.parameters(), lr=0.1, momentum=0.9)
    engine = side.initialize(model, optimizer)
    for step in range(3):
        train(engine, batches(side.accumulation, seed=step))
        optimizer.state = defaultdict(dict)
    return weights(model)


@case()
def optimizer_hooks(side: Side) -> Found:
    """optimizer.register_step_post_hook counts steps and renormalizes a weight."""
    model = Net()
    optimizer = adamw(model)
    engine = side.initialize(model, optimizer)
    steps = []

    def renormalize(*_: object) -> None:
        steps.append(1)
        with torch.no_grad():
            model.head.weight.div_(model.head.weight.norm())

    optimizer.register_step_post_hook(renormalize)
    train(engine, batches(2 * side.accumulation))
    return {**weights(model), "steps": len(steps)}


@case()
def optimizer_step_overridden(side: Side) -> Found:
    """A subclass of AdamW whose step() does more: it decays towards the start after the update."""
    model = Net()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    class TowardsStart(torch.optim.AdamW):
        def step(self, closure: object = None) -> None:
            super().step()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.lerp_(start[name], 0.1)

    return trained(side, model, lambda model: TowardsStart(model.parameters(), lr=1e-2))


@case()
def optimizer_across_parameters(side: Side) -> Found:
    """An optimizer of the user's own whose update of a parameter depends on the gradients of all."""

    class Normalized(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            ps = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in ps]).norm()
            for p in ps:
                p.sub_(0.1 * p.grad / norm)

    return trained(side, Net(), lambda model: Normalized(model.parameters(), {"lr": 0.1}))
