"""Tensors that leave or enter a layer by other ways than an argument and a result."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from tests.exactness.case import ALL, PAIRS, REGROUPED, Found, Tolerance, case
from tests.exactness.models import (
    CLASSES,
    WIDTH,
    Block,
    Given,
    Net,
    batches,
    by_both_loops,
    of_logits,
    own_loss,
    sgd,
    train,
    trained,
    weights,
)
from tests.exactness.sides import Setting, Side


class Hidden:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Carrier(Block):
    def forward(self, x: Any) -> Any:
        return Hidden(super().forward(x if isinstance(x, Tensor) else x.hidden))


class Carrying(Net):
    def body(self, x: Tensor) -> Tensor:
        return super().body(x).hidden


@case(*PAIRS)
def objects_of_a_class(side: Side) -> Found:
    """Blocks hand an object of a plain class from one to the next."""
    return by_both_loops(side, Carrying(Carrier))


class Called(Block):
    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(function(x))


class Calling(Net):
    def __init__(self) -> None:
        super().__init__(Called)
        self.bias = nn.Embedding(2, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        bias = self.bias(torch.arange(len(x)) % 2)
        x = self.front(x)
        for block in self.blocks:
            x = block(x, lambda hidden: hidden + bias)
        return x


@case(*PAIRS, tolerance=REGROUPED)
def closures_over_a_trained_tensor(side: Side) -> Found:
    """Blocks are given a function that adds what an embedding has made (a bias, as a score_mod of flex attention)."""
    return by_both_loops(side, Calling())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Normal:
        mean, log_scale = self.linear(x).chunk(2, -1)
        return Normal(mean, log_scale.exp())


class Autoencoder(Net):
    def __init__(self) -> None:
        super().__init__()
        self.front = Encoder()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        posterior = self.front(x)
        hidden = posterior.rsample()
        for block in self.blocks:
            hidden = block(hidden)
        prior = Normal(torch.zeros(WIDTH), torch.ones(WIDTH))
        return F.cross_entropy(self.head(hidden), labels) + kl_divergence(posterior, prior).mean()


@case(*PAIRS, tolerance=REGROUPED)
def distribution_as_a_result(side: Side) -> Found:
    """A layer returns a torch.distributions.Normal, which is sampled from and measured (a variational autoencoder)."""
    return trained(side, Autoencoder(), sgd, own_loss, steps=3)


SCALE = ContextVar("scale", default=1.0)


class Scaling(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE.get()


class SettingScale(Net):
    def body(self, x: Tensor) -> Tensor:
        token = SCALE.set(0.5 if x[0, 0] > 0 else 2.0)
        x = super().body(x)
        SCALE.reset(token)
        return x


@case(*PAIRS)
def context_variable_set_in_forward(side: Side) -> Found:
    """Forward sets a ContextVar by its data, and blocks read it."""
    return by_both_loops(side, SettingScale(Scaling))


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
    return by_both_loops(side, Overwriting(lambda given, made: made))


@case(*PAIRS)
def result_given_with_a_view_and_written_to(side: Side) -> Found:
    """Blocks return a tensor and a view of it; forward writes into the one in place and goes on from both."""
    return by_both_loops(side, Overwriting(lambda given, made: made.view(-1)))


@case(*PAIRS, tolerance=Tolerance(1e-5, "sums are regrouped, and blocks enlarge what differs"), micro_batch=1)
def result_given_twice_in_slices(side: Side) -> Found:
    """Blocks return one tensor twice, their rows one at a time; forward writes into the one in place."""
    model = Overwriting(lambda given, made: made)
    return by_both_loops(side, model, lambda model: torch.optim.SGD(model.parameters(), lr=1e-3))


class Halves(Block):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x[:, :2], x[:, 2:]


class WritingIntoHalves(Net):
    def body(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            first, second = block(x)
            first += 1
            x = torch.tanh(torch.cat([first, second], 1))
        return x


@case(*PAIRS)
def parts_of_a_result_written_to(side: Side) -> Found:
    """Blocks return two parts of one tensor; forward writes into one of them in place."""
    return by_both_loops(side, WritingIntoHalves(Halves))


# ---- what the model returns


@case(*PAIRS)
def model_returns_a_tuple(side: Side) -> Found:
    """`loss, logits = engine(x, labels)`, and both are used in what is propagated."""

    class Returning(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            return F.cross_entropy(logits, labels), logits

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        loss, logits = engine(x, labels)
        return loss + 0.01 * logits.pow(2).mean()

    return trained(side, Returning(), sgd, loss, steps=3)


@case(*PAIRS)
def outputs_written_into(side: Side) -> Found:
    """`outputs.loss = outputs.loss * 0.5`, and `logits.div_(2)`, a view of which that loss was made."""

    class Returning(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)[:, :2]
            return SimpleNamespace(loss=F.cross_entropy(logits, labels % 2), logits=logits)

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        outputs = engine(x, labels)
        logits = outputs.logits
        outputs.loss = outputs.loss * 0.5
        return outputs.loss + F.cross_entropy(logits.div_(2), labels % 2)

    return trained(side, Returning(), sgd, loss, steps=3)


# ---- what layers write into


class OnAttribute(Block):
    aux: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.aux = torch.tanh(self.linear(x)).pow(2).mean()
        return super().forward(x)


@case(*PAIRS, tolerance=REGROUPED)
def aux_loss_on_an_attribute(side: Side) -> Found:
    """Mixture of experts: each block keeps its balancing loss on `self.aux`, and the model's forward sums them."""

    class Mixture(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            logits = super().forward(x)
            if labels is None:
                return logits
            return F.cross_entropy(logits, labels) + 0.1 * sum(block.aux for block in self.blocks)

    return trained(side, Mixture(OnAttribute), sgd, own_loss, steps=3)


@case(*PAIRS)
def input_written_in_place(side: Side) -> Found:
    """Blocks change their input in place (`x += ...`) and return it."""

    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            x += torch.tanh(self.linear(x * 1.0))
            return x

    return by_both_loops(side, Net(InPlace))


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

    return by_both_loops(side, Over(InPlace))


@case(*PAIRS, tolerance=REGROUPED)
def condition_kept_on_an_attribute(side: Side) -> Found:
    """The model sets `block.condition = ...`, a trained embedding, on every block before it calls them (diffusion)."""

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

    return by_both_loops(side, Over())


class Sharing(Block):
    """Leaves tensors for later blocks, or reads them."""

    def forward(self, x: Tensor, shared: Any) -> Tensor:  # type: ignore[override]
        if "keys" in shared:
            return super().forward(x + shared["keys"][0] * shared["keys"][1])
        shared["keys"] = torch.tanh(self.linear(x)), x * 2
        return x + 1


@case(*PAIRS, tolerance=REGROUPED)
def tensors_left_in_a_dictionary(side: Side) -> Found:
    """The first block puts tensors into a dict, or a UserDict, which the later blocks and the model read (Gemma 3n)."""

    class Over(Net):
        def body(self, x: Tensor) -> Tensor:
            shared: Any = UserDict() if x[0, 0] > 0 else {}
            x = self.front(x)
            for block in self.blocks:
                x = block(x, shared=shared)
            return x * shared["keys"][0]

    return by_both_loops(side, Over(Sharing))


class WritingAfterwards(Net):
    def body(self, x: Tensor) -> Tensor:
        x, shift = self.front(x), torch.zeros(1)
        for block in self.blocks:
            x += block(x, shift)
            shift += 0.5
        return x * 2


@case(*ALL)
def inputs_written_in_place_after_the_layer(side: Side) -> Found:
    """The model's forward writes in place into what it gave to a block, after the call."""
    return by_both_loops(side, WritingAfterwards(Given))


@case(pack_layers=2)
def inputs_written_in_place_within_a_pack(side: Side) -> Found:
    """The same with two layers in a pack."""
    return by_both_loops(side, WritingAfterwards(Given))


@case(*PAIRS, tolerance=REGROUPED, micro_batch=1)
def inputs_written_in_place_in_slices(side: Side) -> Found:
    """The same with rows that go through the layers one at a time."""
    return by_both_loops(side, WritingAfterwards(Given))


# ---- hooks


@case(*PAIRS, tolerance=REGROUPED)
def activation_captured_by_a_hook_on_a_block(side: Side) -> Found:
    """A forward hook on a block captures its output, which the loop adds to the loss (perceptual loss)."""
    model = Net()
    kept: dict[str, Tensor] = {}
    model.blocks[1].register_forward_hook(lambda module, args, output: kept.update(hidden=output))

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        return of_logits(engine, x, labels) + 0.1 * kept["hidden"].pow(2).mean()

    return trained(side, model, sgd, loss, steps=3)


@case(*PAIRS)
def hooks_on_the_model(side: Side) -> Found:
    """A forward pre-hook and a forward hook on the model itself change input and output."""
    model = Net()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model.register_forward_hook(lambda module, args, output: output * 2.0)
    return by_both_loops(side, model)


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
def block_used_a_varying_number_of_times(side: Side) -> Found:
    """How often a block is called depends on the data (pondering)."""

    class Pondering(Net):
        def body(self, x: Tensor) -> Tensor:
            times = 1 + int(x[0, 0] > 0)
            x = self.front(x)
            for _ in range(times):
                x = self.blocks[0](x)
            return x

    return by_both_loops(side, Pondering())


class Headless(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.body(x)


@case(*PAIRS)
def block_output_is_the_models(side: Side) -> Found:
    """A model without a head: the last block's output is what it returns."""
    return by_both_loops(side, Headless())


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

    return by_both_loops(side, Detaching())


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

    return by_both_loops(side, Net(Energy))


@case(*PAIRS)
def gradient_taken_between_layers(side: Side) -> Found:
    """Forward takes the gradient of an energy with respect to the last block's output, and adds it to that."""

    class Forces(Net):
        def body(self, x: Tensor) -> Tensor:
            x = super().body(x)
            (force,) = torch.autograd.grad((x * x.roll(1, -1)).sum(), x, create_graph=True)
            return x + 0.1 * force

    return by_both_loops(side, Forces())


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

    return by_both_loops(side, Over(Viewing))


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

    return by_both_loops(side, Recurrent())


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

    return by_both_loops(side, Encoder())


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
