"""Tensors that leave or enter a layer by other ways than an argument and a result."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

from tests.exactness.case import FOUR, PAIRS, REGROUPED, Found, case
from tests.exactness.models import CLASSES, WIDTH, Block, Net, adamw, batches, by_both_ways, sgd, train, weights
from tests.exactness.sides import Setting, Side


def trained(side: Side, model: nn.Module, optimizer: Any = sgd) -> Found:
    """Two steps in the familiar loop, and two by train_batch."""
    engine = side.initialize(model, optimizer(model))
    losses = by_both_ways(engine, batches(4 * side.accumulation))
    return {**weights(model), "losses": losses}


class Carrying(Net):
    """A net whose blocks take and give `wrap(x)`, of which `tensor(...)` is what counts."""

    def __init__(self, wrap: Any, tensor: Any) -> None:
        super().__init__(lambda: Carrier(wrap, tensor))
        self.wrap, self.tensor = wrap, tensor

    def body(self, x: Tensor) -> Tensor:
        return self.tensor(super().body(x))


class Carrier(Block):
    def __init__(self, wrap: Any, tensor: Any) -> None:
        super().__init__()
        self.wrap, self.tensor = wrap, tensor

    def forward(self, x: Any) -> Any:
        return self.wrap(super().forward(x if isinstance(x, Tensor) else self.tensor(x)))


# ---- results that are written to in place, and what shares their memory


class Twofold(Block):
    """Gives its result, and what `again` makes of it and of what it was given."""

    def __init__(self, again: Any) -> None:
        super().__init__()
        self.again = again

    def forward(self, x: Tensor) -> Any:
        given, x = x, super().forward(x.clone())
        return x, self.again(given, x)


class Overwriting(Net):
    """Doubles the first of what each block gives, and goes on from both."""

    def __init__(self, again: Any) -> None:
        super().__init__(lambda: Twofold(again))

    def body(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            made, again = block(x + 0)
            made.mul_(2)
            x = torch.tanh(made) + torch.sin(again.view(-1, WIDTH))
        return x


@case(*PAIRS)
def result_given_twice_and_written_to(side: Side) -> Found:
    """Blocks return one tensor twice; forward writes into the one in place and goes on from both."""
    return trained(side, Overwriting(lambda given, made: made))


@case(*PAIRS)
def result_given_with_a_view_and_written_to(side: Side) -> Found:
    """Blocks return a tensor and a view of it; forward writes into the one in place and goes on from both."""
    return trained(side, Overwriting(lambda given, made: made.view(-1)))


# ---- objects that carry tensors


class Hidden:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@case(*PAIRS)
def objects_of_a_class(side: Side) -> Found:
    """Blocks hand an object of a plain class from one to the next."""
    return trained(side, Carrying(Hidden, lambda n: n.hidden))


@dataclass
class State:
    hidden: Tensor
    step: int = 0


@case(*PAIRS)
def dataclasses(side: Side) -> Found:
    """Blocks hand a dataclass from one to the next."""
    return trained(side, Carrying(State, lambda s: s.hidden))


@dataclass(frozen=True)
class Frozen:
    hidden: Tensor


@case(*PAIRS)
def frozen_dataclasses(side: Side) -> Found:
    """Blocks hand a frozen dataclass from one to the next."""
    return trained(side, Carrying(Frozen, lambda s: s.hidden))


@dataclass
class Output(ModelOutput):
    hidden: Tensor | None = None


@case(*PAIRS)
def model_outputs(side: Side) -> Found:
    """Blocks hand a transformers ModelOutput from one to the next."""
    return trained(side, Carrying(lambda t: Output(hidden=t), lambda o: o.hidden))


Pair = namedtuple("Pair", "hidden extra")


@case(*PAIRS)
def named_tuples(side: Side) -> Found:
    """Blocks hand a namedtuple from one to the next."""
    return trained(side, Carrying(lambda t: Pair(t, t * 2), lambda p: p.hidden + 0.1 * p.extra))


@case(*PAIRS)
def nested_containers(side: Side) -> Found:
    """Blocks hand {"a": [(x, None)], "b": OrderedDict(...)} from one to the next."""
    return trained(
        side, Carrying(lambda t: {"a": [(t, None)], "b": OrderedDict(n=3)}, lambda d: d["a"][0][0] * (d["b"]["n"] / 3))
    )


@case(*PAIRS)
def closures(side: Side) -> Found:
    """Blocks hand a function that holds the tensor from one to the next."""
    return trained(side, Carrying(lambda t: lambda: t, lambda f: f()))


@case(*PAIRS)
def model_returns_a_model_output(side: Side) -> Found:
    """The model returns a ModelOutput with loss and logits, indexed by outputs[0] and outputs["logits"]."""

    @dataclass
    class Outputs(ModelOutput):
        loss: Tensor | None = None
        logits: Tensor | None = None

    class Returning(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            return Outputs(loss=F.cross_entropy(logits, labels), logits=logits)

    model = Returning()
    engine = side.initialize(model, sgd(model))
    hits = []
    for x, y in batches(3 * side.accumulation):
        outputs = engine(x, labels=y)
        engine.backward(outputs[0])
        hits.append((outputs["logits"].argmax(-1) == y).float().mean())
        engine.step()
    return {**weights(model), "hits": torch.stack(hits)}


@case(*PAIRS)
def model_returns_a_tuple(side: Side) -> Found:
    """`loss, logits = engine(x, labels)`, and both are used in what is propagated."""

    class Returning(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            return F.cross_entropy(logits, labels), logits

    model = Returning()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3 * side.accumulation):
        loss, logits = engine(x, labels=y)
        engine.backward(loss + 0.01 * logits.pow(2).mean())
        engine.step()
    return weights(model)


@case(*PAIRS)
def model_returns_a_dict(side: Side) -> Found:
    """`out = engine(x, labels)`, `out["loss"] + 0.1 * out["aux"]` is propagated."""

    class Returning(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            return {"loss": F.cross_entropy(logits, labels), "aux": logits.pow(2).mean()}

    model = Returning()
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3 * side.accumulation):
        out = engine(x, labels=y)
        engine.backward(out["loss"] + 0.1 * out["aux"])
        engine.step()
    return weights(model)


class TableCache:
    """The program's own, which only has the name in common with what layers fill in generation."""

    def __init__(self) -> None:
        self.scale = torch.linspace(0.5, 1.5, WIDTH)


class Prefixed(Block):
    def forward(self, x: Tensor, table: Any, past_key_values: Any = None) -> Tensor:  # type: ignore[override]
        return super().forward(x * table.scale + past_key_values[0][1])


class OwnCaches(Net):
    def __init__(self) -> None:
        super().__init__(Prefixed)
        self.prefix = nn.Parameter(torch.full((WIDTH,), 0.1))

    def body(self, x: Tensor) -> Tensor:
        x, table, prefix = self.front(x), TableCache(), ((self.prefix * 2, self.prefix),)
        for block in self.blocks:
            x = block(x, table, past_key_values=prefix)
        return x


@case(*FOUR, pack_layers=1, residency="off")
def caches_of_its_own_given(side: Side) -> Found:
    """A trained prefix (`past_key_values=((key, value),)`), and an object whose class the program calls `...Cache`."""
    return trained(side, OwnCaches())


# ---- what layers write into


class Balanced(Block):
    """Mixture of two experts, with a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def mixed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.gate(x).softmax(-1)
        out = sum(share[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return x + torch.tanh(out), share.mean(0).pow(2).sum()


class OnAttribute(Balanced):
    aux: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x, self.aux = self.mixed(x)
        return x


@case(*PAIRS, tolerance=REGROUPED)
def aux_loss_on_an_attribute(side: Side) -> Found:
    """Mixture of experts: each block keeps its balancing loss on `self.aux`, and the model's forward sums them."""

    class Mixture(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            logits = super().forward(x)
            if labels is None:
                return logits
            return F.cross_entropy(logits, labels) + 0.1 * sum(block.aux for block in self.blocks)

    model = Mixture(OnAttribute)
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3 * side.accumulation):
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


@case(*PAIRS, tolerance=REGROUPED)
def aux_loss_returned(side: Side) -> Found:
    """The same, the loss returned beside the hidden states."""

    class Returning(Balanced):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.mixed(x)

    class Mixture(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            x, total = self.front(x), torch.zeros(())
            for block in self.blocks:
                x, aux = block(x)
                total = total + aux
            return F.cross_entropy(self.head(x), labels) + 0.1 * total

    model = Mixture(Returning)
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3 * side.accumulation):
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


@case(*PAIRS, tolerance=REGROUPED)
def sparse_experts(side: Side) -> Found:
    """Mixture of experts by top-1 routing: which experts run depends on the data, and some never do."""

    class Routed(Balanced):
        def forward(self, x: Tensor) -> Tensor:
            share = self.gate(x).softmax(-1)
            best = share.argmax(-1)
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows = (best == i).nonzero()[:, 0]
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * share[rows, i : i + 1])
            return x + out

    return trained(side, Net(Routed))


class WritingDict(Block):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["x"] = super().forward(batch["x"])
        batch[self.name] = batch["x"].mean(-1)
        return batch


class OverDict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WritingDict(f"level{i}") for i in range(3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        batch = {"x": self.front(x)}
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch["x"]) * (1 + sum(batch[f"level{i}"] for i in range(3)))[:, None]


@case(*PAIRS, tolerance=REGROUPED)
def dict_written_into_and_returned(side: Side) -> Found:
    """Blocks write new entries into a dict and return it (as graph libraries do)."""
    return trained(side, OverDict())


@case(*PAIRS)
def input_written_in_place(side: Side) -> Found:
    """Blocks change their input in place (`x += ...`) and return it."""

    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            x += torch.tanh(self.linear(x * 1.0))
            return x

    return trained(side, Net(InPlace))


@case(*PAIRS)
def input_written_in_place_and_not_returned(side: Side) -> Found:
    """Blocks change their input in place and return nothing."""

    class InPlace(Block):
        def forward(self, x: Tensor) -> None:  # type: ignore[override]
            x.add_(torch.tanh(self.linear(x * 1.0)))

    class Over(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.front(x)
            for block in self.blocks:
                block(x)
            return x

    return trained(side, Over(InPlace))


@case(*PAIRS, tolerance=REGROUPED)
def skip_connections_on_a_stack(side: Side) -> Found:
    """A U-Net: outputs of the first blocks are pushed on a list, and popped by the last ones."""

    class Skipping(Net):
        def __init__(self) -> None:
            super().__init__(depth=4)

        def body(self, x: Tensor) -> Tensor:
            x, skips = self.front(x), []
            for block in self.blocks[:2]:
                x = block(x)
                skips.append(x)
            for block in self.blocks[2:]:
                x = block(x + skips.pop())
            return x

    return trained(side, Skipping())


@case(*PAIRS)
def attribute_read_after_the_step(side: Side) -> Found:
    """Forward sets `self.rope_deltas = tensor` and a number; the loop reads them after step(), and after train_batch."""

    class Keeping(Net):
        rope_deltas: Tensor
        last = 0.0

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            self.rope_deltas = x.detach().amax(-1)
            loss = super().forward(x, labels)
            self.last = loss.item()
            return loss

    model = Keeping()
    engine = side.initialize(model, sgd(model))
    seen = []
    for step in range(4):
        group = batches(side.accumulation, seed=step)
        if step % 2:
            engine.train_batch(iter(group))
        else:
            for x, y in group:
                engine.backward(engine(x, y))
                engine.step()
        seen.append(torch.cat([model.rope_deltas, torch.tensor([model.last])]))
    return {**weights(model), "seen": torch.stack(seen)}


@case(*PAIRS)
def mask_kept_on_an_attribute(side: Side) -> Found:
    """The model sets `block.mask = ...` on every block before it calls them, as some attention code does."""

    class Masked(Block):
        mask: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.mask

    class Over(Net):
        def body(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                block.mask = (x > 0).float()
            return super().body(x)

    return trained(side, Over(Masked))


@case(*PAIRS, tolerance=REGROUPED)
def condition_kept_on_an_attribute(side: Side) -> Found:
    """The same with a tensor that carries a gradient: an embedding of the time step, as diffusion code does."""

    class Conditioned(Block):
        condition: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.condition)

    class Over(Net):
        def __init__(self) -> None:
            super().__init__(Conditioned)
            self.time = nn.Linear(1, WIDTH)

        def body(self, x: Tensor) -> Tensor:
            condition = self.time(x[:, :1])
            for block in self.blocks:
                block.condition = condition
            return super().body(x)

    return trained(side, Over())


# ---- hooks


@case(*PAIRS, tolerance=REGROUPED)
def activation_captured_by_a_hook_on_a_block(side: Side) -> Found:
    """A forward hook on a block captures its output, which the loop adds to the loss (perceptual loss)."""
    model = Net()
    kept: dict[str, Tensor] = {}
    model.blocks[1].register_forward_hook(lambda module, args, output: kept.update(hidden=output))
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3 * side.accumulation):
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss + 0.1 * kept["hidden"].pow(2).mean())
        engine.step()
    return weights(model)


@case(*PAIRS)
def output_changed_by_a_hook(side: Side) -> Found:
    """A forward hook on a block returns something else than the block did."""
    model = Net()
    model.blocks[1].register_forward_hook(lambda module, args, output: output * 0.5)
    return trained(side, model)


@case(*PAIRS)
def input_changed_by_a_pre_hook(side: Side) -> Found:
    """A forward pre-hook on a block changes its input."""
    model = Net()
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    return trained(side, model)


@case(*PAIRS)
def hooks_on_the_model(side: Side) -> Found:
    """A forward pre-hook and a forward hook on the model itself change input and output."""
    model = Net()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model.register_forward_hook(lambda module, args, output: output * 2.0)
    return trained(side, model)


@case(*PAIRS)
def hook_added_between_steps(side: Side) -> Found:
    """A forward hook that changes a block's output is registered after a step, and removed after another."""
    model = Net()
    engine = side.initialize(model, sgd(model))
    train(engine, batches(side.accumulation))
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: output * 0.5)
    train(engine, batches(side.accumulation, seed=2))
    handle.remove()
    train(engine, batches(side.accumulation, seed=3))
    return weights(model)


# ---- whose parameters


@case(*PAIRS, tolerance=REGROUPED)
def weight_used_functionally(side: Side) -> Found:
    """Logits by `F.linear(x, self.front.weight)`: another layer's weight, outside its call."""

    class Tied(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            return F.linear(self.body(x), self.front.weight)[:, :CLASSES]

    return trained(side, Tied())


@case(*PAIRS, tolerance=REGROUPED)
def parameter_of_the_model_itself(side: Side) -> Found:
    """A parameter of the root module is used between the blocks (`x * self.scale`, `self.token.expand(...)`)."""

    class Rooted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.token = nn.Parameter(torch.randn(1, WIDTH))

        def body(self, x: Tensor) -> Tensor:
            x = self.front(x) * self.scale + self.token.expand(len(x), -1)
            for block in self.blocks:
                x = block(x)
            return x * self.scale

    return trained(side, Rooted())


@case(*PAIRS, tolerance=REGROUPED)
def block_used_several_times(side: Side) -> Found:
    """One block is called three times in a forward (shared in depth)."""

    class Recurrent(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.front(x)
            for _ in range(3):
                x = self.blocks[0](x)
            return x

    return trained(side, Recurrent())


@case(*PAIRS, tolerance=REGROUPED)
def block_used_a_varying_number_of_times(side: Side) -> Found:
    """How often a block is called depends on the data (pondering)."""

    class Pondering(Net):
        def body(self, x: Tensor) -> Tensor:
            times = 1 + int(x[0, 0] > 0)
            x = self.front(x)
            for _ in range(times):
                x = self.blocks[0](x)
            return x

    return trained(side, Pondering())


@case(*PAIRS)
def early_exit(side: Side) -> Found:
    """Forward leaves after a block if the data say so."""

    class Exiting(Net):
        def body(self, x: Tensor) -> Tensor:
            leave = 1 + int(x[0, 0] > 0)
            x = self.front(x)
            for block in self.blocks[:leave]:
                x = block(x)
            return x

    return trained(side, Exiting())


class Headless(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.body(x)


@case(*PAIRS)
def block_output_is_the_models(side: Side) -> Found:
    """A model without a head: the last block's output is what it returns."""
    return trained(side, Headless())


@case(*PAIRS, tolerance=REGROUPED)
def blocks_in_random_order(side: Side) -> Found:
    """torch.randperm decides the order of the blocks in each forward."""

    class Shuffled(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.front(x)
            for i in torch.randperm(len(self.blocks)).tolist():
                x = self.blocks[i](x)
            return x

    return trained(side, Shuffled())


@case(*PAIRS)
def no_grad_blocks_first(side: Side) -> Found:
    """The model's forward runs its first blocks under torch.no_grad() (a frozen backbone)."""

    class Backbone(Net):
        def body(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.blocks[0](self.front(x))
            return self.blocks[2](self.blocks[1](x))

    return trained(side, Backbone(), adamw)


@case(*PAIRS)
def detached_in_the_middle(side: Side) -> Found:
    """The model's forward detaches between two blocks, and adds an auxiliary head before that."""

    class Detaching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.early = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            x = self.blocks[0](self.front(x))
            early = self.early(x)
            return self.head(self.blocks[2](self.blocks[1](x.detach()))) + early

    return trained(side, Detaching())


@case(*PAIRS)
def straight_through(side: Side) -> Found:
    """A custom autograd.Function with a straight-through gradient inside a block."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 0.5

    class Rounding(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Round.apply(x))

    return trained(side, Net(Rounding))


@case(*PAIRS)
def gradient_inside_forward(side: Side) -> Found:
    """A block computes a gradient of its own energy in forward, by autograd.grad(create_graph=True)."""

    class Energy(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                if not x.requires_grad:
                    x = x.requires_grad_(True)
                energy = torch.tanh(self.linear(x)).pow(2).sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return x - 0.1 * force

    return trained(side, Net(Energy))


@case(*PAIRS)
def gradient_taken_between_layers(side: Side) -> Found:
    """Forward takes the gradient of an energy with respect to the last block's output, and adds it to that."""

    class Forces(Net):
        def body(self, x: Tensor) -> Tensor:
            x = super().body(x)
            (force,) = torch.autograd.grad((x * x.roll(1, -1)).sum(), x, create_graph=True)
            return x + 0.1 * force

    return trained(side, Forces())


@case(*PAIRS, tolerance=REGROUPED)
def view_of_the_input_returned(side: Side) -> Found:
    """Blocks return views: of their input, of a parameter (`self.pos[:n]`), and an expanded one."""

    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos = nn.Parameter(torch.randn(4, WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x[:, :WIDTH], self.pos[: len(x)], self.pos[:1].expand(len(x), -1)

    class Over(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.front(x)
            for block in self.blocks:
                x, pos, first = block(x)
                x = torch.tanh(x + pos + first)
            return x

    return trained(side, Over(Viewing))


@case(*PAIRS)
def recurrent_layers(side: Side) -> Found:
    """nn.LSTM and nn.GRU as layers, their states handed from one to the next."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.second = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x, (h, _) = self.first(x[:, None].expand(-1, 3, -1))
            x, _ = self.second(x, torch.cat([h, h]))
            return self.head(x[:, -1])

    return trained(side, Recurrent())


@case(*PAIRS)
def transformer_layers(side: Side) -> Found:
    """nn.TransformerEncoder with dropout and a mask."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(3)
            return self.head(self.encoder(x[:, None].expand(-1, 3, -1).clone(), mask=mask)[:, -1])

    return trained(side, Encoder())


@case()
def state_carried_over_within_a_group(side: Side) -> Found:
    """Truncated backpropagation through time: the loop keeps the hidden state, detached, and hands it back in."""
    return carried(side, detach=True)


@case(Setting(2, 0.0), Setting(2, 1.0), tolerance=REGROUPED)
def state_carried_over_with_its_graph(side: Side) -> Found:
    """The state is not detached: the loss of the second micro-batch reaches through the first, and both are summed."""
    return carried(side, detach=False)


class Stateful(Net):
    def forward(self, x: Tensor, state: Tensor) -> Any:  # type: ignore[override]
        hidden = torch.tanh(self.body(x) + state)
        return self.head(hidden), hidden


def carried(side: Side, detach: bool) -> Found:
    model = Stateful()
    engine = side.initialize(model, sgd(model))
    state, total = torch.zeros(2, WIDTH), None
    for i, (x, y) in enumerate(batches(2 * side.accumulation)):
        logits, state = engine(x, state)
        loss = F.cross_entropy(logits, y)
        if detach:
            state = state.detach()
            engine.backward(loss)
        else:
            total = loss if total is None else total + loss
            if i % 2:
                engine.backward(total)
                state, total = state.detach(), None
        engine.step()
    return weights(model)
