"""What the layer calls of a micro-batch are given, and what is known of it from the call before."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

import harmony_ds
from harmony_ds.calls.intercept import Request
from harmony_ds.calls.keeping import Kept
from harmony_ds.calls.taking import Given, Taking
from harmony_ds.errors import ModelError

WIDTH = 4


def request(*args: Any, **kwargs: Any) -> Request:
    return Request(0, nn.Identity(), args, kwargs, contextvars.copy_context(), True, None)


def kept_of(given: Given) -> list[object]:
    """As a layer call would keep it: what needs a gradient elsewhere."""
    return [object() if t.requires_grad else Kept.of(t, "layer") for t in given.tensors]


def taken(taking: Taking, call: Request) -> Given:
    """The call is taken, run and recorded."""
    given = taking.take(call)
    taking.remember(call, given, kept_of(given))
    return given


MASK, OTHER, COS, SIN = (torch.full((2,), float(n)) for n in range(4))
TABLES = (COS, SIN)


def hidden() -> Tensor:
    return torch.ones(2, requires_grad=True)


def test_a_call_like_the_one_before_shares_what_is_known_of_that() -> None:
    taking, second = Taking(), hidden()
    first = taken(taking, request(hidden(), MASK, tables=TABLES, flag=True))
    given = taken(taking, request(second, MASK, tables=TABLES, flag=True))
    assert given.arguments is first.arguments
    assert given.tensors[0] is second and given.tensors[1:] == [MASK, COS, SIN]
    assert [kept is not None for kept in given.kept] == [False, True, True, True]
    inputs = [second, *(kept.tensor for kept in given.kept[1:] if kept is not None)]
    args, kwargs, _, made = given.arguments.filled(inputs)
    assert args[0] is second and args[1] is inputs[1]
    assert [*kwargs] == ["tables", "flag"] and kwargs["flag"] is True
    assert all(a is b for a, b in zip(kwargs["tables"], inputs[2:], strict=True))
    assert not made


def test_another_tensor_that_is_an_argument_is_taken_in_its_place() -> None:
    taking = Taking()
    first = taken(taking, request(hidden(), MASK, tables=TABLES))
    given = taken(taking, request(hidden(), OTHER, tables=TABLES))
    assert given.arguments is first.arguments
    assert given.tensors[1] is OTHER
    assert [kept is not None for kept in given.kept] == [False, False, True, True]
    third = taken(taking, request(hidden(), MASK, tables=TABLES))
    assert third.kept[1] is not None and third.kept[1].tensor.data_ptr() == MASK.data_ptr()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: request(x, MASK, tables=(COS, SIN), flag=True),
        lambda x: request(x, MASK, tables=(COS, OTHER), flag=True),
        lambda x: request(x, MASK, tables=TABLES, flag=False),
        lambda x: request(x, MASK, flag=True, tables=TABLES),
        lambda x: request(x, mask=MASK, tables=TABLES, flag=True),
        lambda x: request(x, None, tables=TABLES, flag=True),
        lambda x: request(MASK, MASK, tables=TABLES, flag=True),
        lambda x: request(x, x, tables=TABLES, flag=True),
        lambda x: request(x, COS, tables=TABLES, flag=True),
        lambda x: request(x, MASK, tables=TABLES),
        lambda x: request(x, MASK, tables=TABLES, flag=True, more=1),
    ],
)
def test_a_call_that_is_another_is_looked_at_for_itself(call: Callable[[Tensor], Request]) -> None:
    taking, x = Taking(), hidden()
    taken(taking, request(hidden(), MASK, tables=TABLES, flag=True))
    given, alone = taking.take(call(x)), Taking().take(call(x))
    assert not given.kept
    assert all(a is b for a, b in zip(given.tensors, alone.tensors, strict=True))
    assert given.arguments.places == alone.arguments.places


class Pair(NamedTuple):
    one: Any
    two: Any


@pytest.mark.parametrize(
    "arguments",
    [([MASK],), ({"mask": MASK},), (Pair(MASK, []),), (BaseModelOutput(last_hidden_state=MASK),), ((hidden(), MASK),)],
    ids=["list", "dictionary", "list in a tuple", "registered with torch", "gradient in a tuple"],
)
def test_what_a_layer_may_write_into_or_has_a_gradient_in_it_is_not_shared(arguments: tuple[Any, ...]) -> None:
    taking = Taking()
    taken(taking, request(hidden(), *arguments))
    assert not taken(taking, request(hidden(), *arguments)).kept


def test_no_tensor_that_needs_a_gradient_is_held() -> None:
    taking, x = Taking(), hidden()
    reference = weakref.ref(x)
    for _ in range(2):
        taken(taking, request(x, MASK, tables=TABLES))
    del x
    assert reference() is None


def test_nothing_is_known_once_no_more_calls_come() -> None:
    taking = Taking()
    taken(taking, request(hidden(), MASK))
    taking.forget()
    assert not taking.take(request(hidden(), MASK)).kept


def test_a_tensor_whose_memory_was_exchanged_is_another() -> None:
    mask = MASK.clone()
    kept = Kept.of(mask, "layer")
    assert kept.still_is(mask)
    mask.data = OTHER.clone()
    assert not kept.still_is(mask)
    kept.check()  # what it was given is there
    kept.tensor.data = OTHER.clone()
    with pytest.raises(ModelError, match="changed in place"):
        kept.check()


@pytest.mark.parametrize("change", [lambda t: t.add_(1), lambda t: t.requires_grad_(), lambda t: t.unsqueeze_(0)])
def test_a_tensor_that_was_changed_is_another(change: Callable[[Tensor], object]) -> None:
    mask = MASK.clone()
    kept = Kept.of(mask, "layer")
    change(mask)
    assert not kept.still_is(mask)


# ---- in training


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, tables: tuple[Tensor, Tensor], scale: float = 1.0) -> Tensor:
        cos, sin = tables
        return x + torch.tanh(self.inner(x * cos + sin) + mask) * scale  # sums save nothing for backward


class Net(nn.Module):
    """Layers whose arguments are what `given` makes of them."""

    def __init__(self, given: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        arguments: dict[str, Any] = {"mask": (x[0] > 0).float(), "tables": (x[0].cos(), x[0].sin())}
        for number, layer in enumerate(self.layers):
            arguments = self.given(number, arguments)
            x = layer(x, **arguments)
        return x.square().mean()


def put_data(tensor: Tensor, number: int, size: int = WIDTH) -> Tensor:
    tensor.data = torch.full((size,), float(number))
    return tensor


GIVEN: dict[str, Callable[[int, dict[str, Any]], dict[str, Any]]] = {
    "the same": lambda number, given: given,
    "another mask": lambda number, given: {**given, "mask": given["mask"] + number},
    "masks by turns": lambda number, given: {**given, "mask": given["tables"][number % 2]},
    "another table": lambda number, given: {**given, "tables": (given["tables"][0], given["mask"] + number)},
    "another memory": lambda number, given: {**given, "mask": put_data(given["mask"], number)},
    "another shape": lambda number, given: {**given, "mask": put_data(given["mask"], number, size=1)},
    "another memory in a tuple": lambda number, given: {
        **given,
        "tables": (given["tables"][0], put_data(given["tables"][1], number)),
    },
    "the same tuple over other memory": lambda number, given: [given, put_data(given["tables"][1], number)][0],
    "another flag": lambda number, given: {**given, "scale": 1.0 + number},
    "another order": lambda number, given: dict(reversed(given.items())) if number % 2 else given,
}


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return iter([torch.randn(2, WIDTH, generator=generator) for _ in range(6)])


@pytest.mark.parametrize("pack_layers", [1, 2, 6])
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_layers_get_what_the_model_gives_them(given: Callable[..., Any], pack_layers: int) -> None:
    results = []
    for engines in (False, True):
        model = Net(given)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if engines:
            engine, *_ = harmony_ds.initialize(
                model=model,
                optimizer=optimizer,
                config={
                    "train_micro_batch_size_per_gpu": 2,
                    "gradient_accumulation_steps": 3,
                    "gradient_clipping": 0,
                    "harmony": {
                        "device": "cpu",
                        "pack_layers": pack_layers,
                        "fuse_last_pack": False,
                        "residency": "off",
                    },
                },
            )
            for x in batches():
                engine.backward(engine(x))
                engine.step()
        else:
            for number, x in enumerate(batches()):
                (model(x) / 3).backward()
                if number % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
