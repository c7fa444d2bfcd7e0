"""What a plain loop may do with outputs without ending the grouping of its micro-batches."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from harmony_ds import BatchError
from harmony_ds.step.pending import PendingTensor
from tests.engine.drive import config_of, engine_for, loop_plainly, loop_with, random_rows, sgd
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

ROWS, TOKENS, WORDS = 2, 6, 11


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (ROWS, TOKENS), generator=generator) for _ in range(4)]


def correct(out: Any, labels: Tensor) -> Tensor:
    return (out.logits.argmax(-1) == labels).float().mean()


def under_no_grad(look: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    def look_without_gradients(out: Any, labels: Tensor) -> Any:
        with torch.no_grad():
            return look(out, labels)

    return look_without_gradients


STRUCTURE: dict[str, Callable[[Any, Tensor], Any]] = {
    "keys": lambda out, y: list(out.keys()),
    "iteration": lambda out, y: list(out),
    "length": lambda out, y: len(out),
    "items": lambda out, y: out.items(),
    "list of items": lambda out, y: [key for key, _ in out.items()],
    "values": lambda out, y: list(out.values()),
    "to_tuple": lambda out, y: out.to_tuple(),
    "unpacked": lambda out, y: {**out},
    "dict": lambda out, y: dict(out),
    "place": lambda out, y: out[1],
    "slice": lambda out, y: out[:2],
    "key": lambda out, y: out["logits"],
    "hasattr": lambda out, y: (hasattr(out, "keys"), hasattr(out, "logits"), hasattr(out, "aux_loss")),
    "getattr": lambda out, y: getattr(out, "aux_loss", None),
    "get": lambda out, y: (out.get("logits"), out.get("aux_loss", 3)),
    "None": lambda out, y: (out.past_key_values is None, out.hidden_states is None),
    "in": lambda out, y: ("logits" in out, "aux_loss" in out, "past_key_values" in out),
    "isinstance": lambda out, y: (isinstance(out, dict), isinstance(out, CausalLMOutputWithPast)),
    "truth": lambda out, y: bool(out),
    "fields": lambda out, y: [field.name for field in dataclasses.fields(out)],
    "pytree": lambda out, y: len(tree_leaves(out)),
}
FUNCTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "argmax": lambda out, y: out.logits.argmax(-1),
    "accuracy": correct,
    "number correct": lambda out, y: (out.logits.argmax(-1) == y).sum(),
    "number correct by a mask": lambda out, y: ((out.logits.argmax(-1) == y) & (y != 3)).sum().float() / 4,
    "not equal": lambda out, y: (out.logits.argmax(-1) != y).any(),
    "all": lambda out, y: torch.all(out.logits.isfinite()),
    "not": lambda out, y: ~(out.logits > 0),
    "argmin": lambda out, y: torch.argmin(out.logits),
    "confidence": lambda out, y: out.logits.softmax(-1).max(-1).values,
    "max of a dimension": lambda out, y: out.logits.max(dim=-1),
    "min of a dimension": lambda out, y: torch.min(out.logits, 1)[0],
    "topk": lambda out, y: out.logits.topk(3),
    "top 5 accuracy": lambda out, y: (out.logits.topk(5, -1).indices == y[..., None]).any(-1).float().mean(),
    "sort": lambda out, y: out.logits.sort(-1, descending=True),
    "argsort": lambda out, y: out.logits.argsort(-1),
    "median": lambda out, y: out.logits.median(-1).indices,
    "kthvalue": lambda out, y: torch.kthvalue(out.logits, 2, -1),
    "aminmax": lambda out, y: torch.aminmax(out.logits),
    "vector norm": lambda out, y: torch.linalg.vector_norm(out.logits),
    "norm": lambda out, y: torch.linalg.norm(out.logits.flatten(0, 1)),
    "norm of a detached one": lambda out, y: out.logits.detach().norm(),
    "count of nonzero": lambda out, y: torch.count_nonzero(out.logits > 0.1),
    "standard deviation and mean": lambda out, y: torch.std_mean(out.logits),
    "variance": lambda out, y: out.logits.detach().var(),
    "entropy": lambda out, y: -(out.logits.softmax(-1) * out.logits.log_softmax(-1)).sum(-1).mean(),
    "perplexity": lambda out, y: out.loss.detach().exp(),
    "one hot": lambda out, y: F.one_hot(out.logits.argmax(-1), WORDS),
    "quantile": lambda out, y: out.logits.float().quantile(0.5),
    "product": lambda out, y: out.logits.prod(-1),
    "to integers": lambda out, y: (out.logits * 10).long(),
    "rounded": lambda out, y: out.logits.round(),
    "sign": lambda out, y: (out.logits.sign() == 1).int(),
    "floor division": lambda out, y: out.logits // 2,
    "remainder": lambda out, y: out.logits % 2,
    "power of two": lambda out, y: 2**out.logits,
    "close": lambda out, y: torch.isclose(out.logits, torch.ones(1)).float().mean(),
    "cumulated maximum": lambda out, y: out.logits.cummax(-1).values,
    "mean of classes": lambda out, y: out.logits.view(-1, WORDS).mean(0),
    "log of softmax": lambda out, y: F.log_softmax(out.logits.float(), dim=-1),
    "gathered": lambda out, y: out.logits.log_softmax(-1).gather(-1, y[..., None]).squeeze(-1),
    "shifted": lambda out, y: (out.logits[:, :-1].argmax(-1) == y[:, 1:]).float().mean(),
    "masked": lambda out, y: out.logits[y != 3].argmax(-1),
    "to the host": lambda out, y: out.logits.detach().cpu(),
    "to a dtype": lambda out, y: out.logits.detach().to(torch.float64),
    "parts": lambda out, y: out.logits.chunk(2, -1),
    "rows": lambda out, y: out.logits.unbind(0),
    "divergence": lambda out, y: F.kl_div(out.logits.log_softmax(-1), out.logits.softmax(-1), reduction="batchmean"),
    "similarity": lambda out, y: F.cosine_similarity(out.logits.unsqueeze(1), out.logits.unsqueeze(2), dim=-1),
    "cross entropy": lambda out, y: F.cross_entropy(out.logits.view(-1, WORDS), y.view(-1)),
    "stacked": lambda out, y: torch.stack([out.loss.detach(), out.logits.mean()]),
    "where": lambda out, y: torch.where(out.logits > 0, out.logits, torch.zeros(())),
    "histogram of predictions": lambda out, y: (out.logits.argmax(-1)[..., None] == torch.arange(WORDS)).sum((0, 1)),
}
LOOKS: dict[str, dict[str, Callable[[Any, Tensor], Any]]] = {
    "functions": FUNCTIONS,
    "functions under no_grad": {name: under_no_grad(look) for name, look in FUNCTIONS.items()},
    "structure": STRUCTURE,
}


def kept(found: Any) -> list[Any]:
    """Tensors as lists, whose values are asked for now; other things as they are."""
    found = list(found) if not isinstance(found, (Tensor, str)) and hasattr(found, "__iter__") else found
    return [one.tolist() if isinstance(one, Tensor) else one for one in tree_leaves(found)]


@pytest.mark.parametrize("kind", LOOKS)
def test_a_look_that_needs_no_value_yet_waits_and_has_the_bits_of_plain_torch(kind: str) -> None:
    seen: list[tuple[str, Any]] = []

    def loss_of(call: Any, ids: Tensor) -> Tensor:
        out = call(input_ids=ids, labels=ids)
        for name, look in LOOKS[kind].items():
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "a loss or an output was looked at")
                seen.append((name, look(out, ids)))
        return out.loss

    plain, model = llama(), llama()
    losses = loop_plainly(plain, batches(), 2, loss_of)
    expected = [(name, kept(one)) for name, one in seen]
    seen.clear()
    with engine_for(model, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        assert loop_with(engine, batches(), loss_of) == (losses, [1.0, 1.0])
    assert [(name, kept(one)) for name, one in seen] == expected
    assert_same(model, plain, bitwise=True)


def test_predictions_of_an_evaluation_without_no_grad_are_there_at_any_later_time() -> None:
    model, ids = llama(), batches()[0]
    with torch.no_grad():
        expected = model(input_ids=ids).logits.argmax(-1)
    with engine_for(model, sgd, config_of(2)) as engine:
        engine.eval()
        with pytest.warns(RuntimeWarning, match="looked at before"):
            predicted = engine(input_ids=ids).logits.argmax(-1)
    assert torch.equal(predicted, expected)


def test_an_evaluation_without_no_grad_is_no_part_of_a_step_or_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain, (ids, *rest) = llama(), llama(), batches()
    for one in (ids, rest[0]):
        (plain(input_ids=one, labels=one).loss / 2).backward()
    optimizer = sgd(plain.parameters())
    optimizer.step()
    with engine_for(model, sgd, config_of(2)) as engine:
        engine.eval()
        for one in rest:
            with pytest.warns(RuntimeWarning, match="looked at before") if one is rest[0] else nullcontext():
                loss = engine(input_ids=one, labels=one).loss  # still held when the checkpoint is saved
                assert loss.item() > 0
        engine.save_checkpoint(str(tmp_path))
        del loss
        engine.train()
        engine.train_batch([{"input_ids": one, "labels": one} for one in (ids, rest[0])])
    assert "have to be handed over again" not in caplog.text
    assert_same(model, plain, bitwise=True)


def test_results_with_names_keep_them() -> None:
    with engine_for(llama(), sgd, config_of(2)) as engine:
        ids = batches()[0]
        largest = engine(input_ids=ids, labels=ids).logits.max(-1)
        assert isinstance(largest, torch.return_types.max)
        assert isinstance(largest.values, PendingTensor) and isinstance(largest.indices, PendingTensor)


def test_a_key_value_cache_among_the_outputs_is_there_and_costs_nothing_until_it_is_used() -> None:
    model = llama()
    model.config.use_cache = True
    with engine_for(model, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        for ids in batches():
            out = engine(input_ids=ids, labels=ids)
            assert out.past_key_values is not None and isinstance(out.past_key_values, object)
            assert list(out.keys()) == ["loss", "logits", "past_key_values"]
            assert len(out.to_tuple()) == 3
            engine.backward(out.loss)
            engine.step()
        assert engine.swap_report().ratio == 1.0
        with pytest.warns(RuntimeWarning, match="looked at before"):
            layers = engine(input_ids=ids, labels=ids).past_key_values.layers
        assert type(layers) is list


class Sometimes(nn.Sequential):
    """An auxiliary output that is there for some data."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = super().forward(x)
        return {"loss": y.mean(), "scores": y, "aux": y.sum() if x.sum() > 0 else None}


def test_outputs_that_are_not_what_the_program_was_told_are_refused_by_name() -> None:
    with engine_for(Sometimes(nn.Linear(3, 3), nn.Linear(3, 3)), sgd, config_of(1)) as engine:
        outputs = engine(-torch.ones(2, 3))
        assert outputs["aux"] is None
        engine.backward(outputs["loss"])
        engine.step()
        engine.backward(engine(torch.ones(2, 3))["loss"])
        with pytest.raises(BatchError, match=r"gave loss, scores, aux where .* returned loss, scores, aux \(None\)"):
            engine.step()


class Nested(nn.Sequential):
    """Outputs of one kind of container."""

    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        torch.manual_seed(5)
        super().__init__(*(nn.Linear(4, 4) for _ in range(4)))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(super().forward(x))


@dataclasses.dataclass
class Inner:
    parts: list[Tensor]
    note: str | None = None


@dataclasses.dataclass
class Outer:
    inner: Inner
    by_name: dict[str, Any]


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], list[Tensor]]]] = {
    "list in a tuple": (lambda y: ([*y.unbind(0)],), lambda out: out[0]),
    "tuple in a tuple": (lambda y: (y.unbind(0),), lambda out: list(out[0])),
    "list": (lambda y: list(y.unbind(0)), lambda out: out),
    "list of lists": (lambda y: [[y, y.tanh()], [y.exp()]], lambda out: [*out[0], *out[1]]),
    "list of dicts": (lambda y: [{"a": y}, {"a": y.tanh()}], lambda out: [one["a"] for one in out]),
    "dict of lists": (lambda y: {"a": [y], "b": {"c": (y, None)}}, lambda out: [*out["a"], out["b"]["c"][0]]),
    "dataclass": (lambda y: Inner([y, y.tanh()]), lambda out: out.parts),
    "nested dataclass": (
        lambda y: Outer(Inner([y, y.exp()], "note"), {"c": [y.tanh()]}),
        lambda out: [*out.inner.parts, *out.by_name["c"]] if out.inner.note == "note" else [],
    ),
    "tuple with a name": (lambda y: (y, "raw", [y.tanh()]), lambda out: [out[0], *out[2]]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_tensors_in_containers_of_any_depth_are_grouped(name: str) -> None:
    kind, parts_of = CONTAINERS[name]
    plain, model = Nested(kind), Nested(kind)
    data = [random_rows(number, 2, 4) for number in range(6)]

    def loss_of(call: Any, x: Tensor) -> Tensor:
        return torch.stack([part.square().mean() for part in parts_of(call(x))]).sum()

    expected = loop_plainly(plain, data, 3, loss_of)
    with engine_for(model, sgd, config_of(3, None, {"pack_layers": 1})) as engine:
        assert loop_with(engine, data, loss_of) == (expected, [1.0, 1.0])
    assert_same(model, plain, bitwise=True)
