"""Outputs that wait are an instance of what the model returns, whatever is done to them."""

# ruff: noqa: PLW0108

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils import ModelOutput

from harmony_ds.device import CpuDevice
from harmony_ds.errors import BatchError
from harmony_ds.model.contract import Contract
from harmony_ds.profiling.sample import form_of_inputs
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.step.inputs import CallInputs
from harmony_ds.step.output_kinds import CallForm, OutputKind, OutputKinds
from harmony_ds.step.pending import PendingTensor
from tests.step.test_pending import FakeSource


class Outputs(dict[str, Any]):
    """As transformers' ModelOutput: attributes, keys, and a tuple's places."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


@dataclasses.dataclass
class Plain:
    loss: Tensor
    logits: Tensor


class Object:
    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


@dataclasses.dataclass
class Model(ModelOutput):  # type: ignore[misc]
    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None


CLASSES: list[Any] = [dict, Outputs, Model, Plain, Object]
FORM, ANOTHER_FORM = CallForm(((2, 3),), "modes"), CallForm(((2, 3), (4,)), "other modes")


def outputs_like(real: Any, form: CallForm = FORM) -> tuple[Any, FakeSource]:
    """Return what stands for outputs like `real`, of a call of another or the same form, and the call."""
    kind, source = OutputKind(), FakeSource(lambda _: real, torch.ones(()))
    kind.learn(real, FORM)
    return kind.outputs(source, form, torch.device("cpu")), source


def waiting(cls: Any) -> tuple[Any, Any, FakeSource]:
    """Outputs that wait, the real ones, and their call, whose other outputs than the loss are not known."""
    real = cls(loss=torch.tensor(6.0), logits=torch.ones(2))
    output, source = outputs_like(real, ANOTHER_FORM)
    return output, real, source


def logits_of(outputs: Any) -> Any:
    return outputs["logits"] if isinstance(outputs, dict) else outputs.logits


@pytest.mark.parametrize("cls", CLASSES)
def test_outputs_are_of_the_models_own_class(cls: Any) -> None:
    output, real, source = waiting(cls)

    assert isinstance(output, cls)
    assert dataclasses.is_dataclass(output) is dataclasses.is_dataclass(real)
    assert not source.looked
    assert logits_of(output) is logits_of(real)
    assert source.looked
    assert isinstance(output, cls)


WAYS: list[tuple[Any, list[Callable[[Any], Any]]]] = [
    (dict, [lambda o: o["loss"], lambda o: o.get("loss")]),
    (Outputs, [lambda o: o.loss, lambda o: o["loss"], lambda o: o[0]]),
    (Model, [lambda o: o.loss, lambda o: o["loss"], lambda o: o[0], lambda o: o.get("loss")]),
    (Plain, [lambda o: o.loss]),
]


@pytest.mark.parametrize(("cls", "way"), [(cls, way) for cls, ways in WAYS for way in ways])
def test_the_loss_is_found_without_a_look(cls: Any, way: Callable[[Any], Any]) -> None:
    output, _, source = waiting(cls)

    assert isinstance(way(output), PendingTensor)
    assert isinstance(output, Plain) or "loss" in output
    assert not source.looked


@pytest.mark.parametrize("cls", CLASSES)
def test_tensors_wait_in_calls_of_a_form_that_is_known(cls: Any) -> None:
    real = cls(loss=torch.tensor(6.0), logits=torch.ones(2, dtype=torch.bfloat16))
    output, source = outputs_like(real)
    logits = logits_of(output)

    assert isinstance(logits, PendingTensor) and logits is logits_of(output)
    assert (logits.shape, logits.dtype, logits.requires_grad) == (torch.Size([2]), torch.bfloat16, False)
    assert not source.looked
    assert logits.tolist() == [1.0, 1.0]


Pair = namedtuple("Pair", ["logits", "loss"])


@pytest.mark.parametrize(
    "real", [(torch.ones(2), torch.ones(())), [torch.ones(2)], Pair(torch.ones(2), torch.ones(()))]
)
def test_a_sequence_of_tensors_may_be_unpacked(real: Any) -> None:
    output, source = outputs_like(real)

    assert type(output) is type(real) and all(isinstance(one, PendingTensor) for one in output)
    assert not source.looked
    assert [one.tolist() for one in output] == [one.tolist() for one in real]
    assert outputs_like(real, ANOTHER_FORM)[0] is None
    assert outputs_like((*real, None))[0][-1] is None
    assert outputs_like((*real, 3))[0] is None


def test_a_dict_of_losses_is_summed_without_a_look() -> None:
    real = {"boxes": torch.tensor(1.0), 2: torch.tensor(5.0)}
    output, source = outputs_like(real, ANOTHER_FORM)
    total = sum(output.values())
    assert isinstance(total, PendingTensor) and type(output) is dict and not source.looked
    del real["boxes"]
    with pytest.raises(BatchError, match=r"gave 2 where calls of the same form had returned boxes, 2,"):
        total.tolist()


def test_none_that_turns_out_to_be_a_tensor_is_refused() -> None:
    real = {"loss": torch.ones(()), "aux": None}
    output, source = outputs_like(real)
    assert output["aux"] is None and not source.looked
    real["aux"] = torch.ones(())
    with pytest.raises(
        BatchError, match=r"gave loss, aux where calls of the same form had returned loss, aux \(None\)"
    ):
        output["loss"].tolist()


def test_calls_of_each_form_have_keys_of_their_own() -> None:
    kind, one = OutputKind(), torch.tensor(1.0)
    both, first, another = (CallForm(((rows,),), "modes") for rows in (1, 2, 3))
    kind.learn({"a": one, "b": one}, both)
    kind.learn({"a": one}, first)
    made = [kind.outputs(FakeSource(torch.exp, one), form, one.device) for form in (both, first, another)]
    assert [[*made[0]], [*made[1]], type(made[2]) is dict] == [["a", "b"], ["a"], False]


def test_a_tuple_that_turns_out_to_have_another_length_is_refused() -> None:
    real = {"hidden": (torch.ones(2), torch.ones(3))}
    hidden = outputs_like(real)[0]["hidden"]
    assert [one.shape.numel() for one in hidden] == [2, 3]
    real["hidden"] = real["hidden"][1:]
    with pytest.raises(BatchError, match=r"gave hidden \(tuple of 1\) where .* returned hidden \(tuple of 2\)"):
        hidden[0].tolist()


def test_one_tensor_waits_in_calls_of_a_form_that_is_known_or_if_it_is_a_loss() -> None:
    assert outputs_like(torch.ones(2))[0].shape == (2,)
    assert outputs_like(torch.ones(2), ANOTHER_FORM)[0] is None
    assert outputs_like(torch.ones(()), ANOTHER_FORM)[0].requires_grad
    count = outputs_like((torch.ones(()), torch.tensor(3)), ANOTHER_FORM)[0][1]  # of tokens
    assert (count.dtype, count.requires_grad) == (torch.int64, False)


def test_a_number_that_has_a_dimension_with_other_rows_is_no_loss() -> None:
    kind = OutputKind()
    one_row, two_rows, three_rows = (CallForm(((rows, 4),), "modes") for rows in (1, 2, 3))
    kind.learn(torch.ones(()), one_row)  # squeezed
    kind.learn(torch.ones(2), two_rows)
    kind.learn(torch.ones(()), one_row)
    assert kind.outputs(FakeSource(torch.exp, torch.ones(())), three_rows, torch.device("cpu")) is None


@pytest.mark.parametrize("cls", [dict, Model])
@pytest.mark.parametrize(
    "look",
    [
        lambda o: list(o),
        lambda o: list(o.items()),
        lambda o: {**o},
        lambda o: "logits" in o,
        lambda o: "hidden" in o,
        lambda o: len(o),
        lambda o: o.get("nothing", 3),
        lambda o: torch.utils._pytree.tree_map(lambda leaf: leaf + 1, o),
        lambda o: copy.copy(o),
        lambda o: copy.deepcopy(o),
        lambda o: pickle.loads(pickle.dumps(o)),
    ],
)
def test_whatever_is_done_to_a_mapping_gives_what_the_real_one_gives(cls: Any, look: Callable[[Any], Any]) -> None:
    output, real, _ = waiting(cls)

    assert repr(look(output)) == repr(look(copy.copy(real)))


@pytest.mark.parametrize("cls", [Model, Plain, Object])
def test_what_is_put_on_outputs_stays_and_what_was_taken_from_them_too(cls: Any) -> None:
    output, _, _ = waiting(cls)
    loss = output.loss
    output.loss, output.logits, output.more = loss * 0.5, 3, 4

    assert (output.loss, output.logits, output.more, loss) == (3.0, 3, 4, 6.0)


def test_what_the_outputs_do_not_have_is_their_error() -> None:
    output, _, source = waiting(Outputs)
    assert not hasattr(output, "__array__")
    assert not source.looked
    with pytest.raises(KeyError, match="hidden"):
        _ = output.hidden


def test_a_loss_that_is_not_first_is_not_found_by_its_place() -> None:
    real = Outputs(logits=torch.ones(2), loss=torch.tensor(6.0))
    output, _ = outputs_like(real, ANOTHER_FORM)

    assert isinstance(output["loss"], PendingTensor)
    assert output[0] is real["logits"]


@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: {"loss": loss}])
@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_one_number_that_no_name_calls_a_loss_is_one_only_without_dimensions(wrap: Any, shape: tuple[int, ...]) -> None:
    output, _ = outputs_like(wrap(torch.zeros(shape)), ANOTHER_FORM)
    assert (output is None) is (shape != () and wrap(1) == 1)


def call_of(*args: Any, **kwargs: Any) -> MicroBatch:
    state, home = Contract(torch.nn.Linear(1, 1)).read_state(), torch.device("cpu")
    inputs, form = (args, kwargs), form_of_inputs((args, kwargs), None)
    return MicroBatch(
        0, 0, lambda: None, lambda outputs: None, None, state, home, CpuDevice(), inputs_form=form, inputs=inputs
    )


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (call_of(1.0, True), call_of(1.0, False), False),
        (call_of(1.0, labels=2.0), call_of(1.0), False),
        (call_of(1.0, 2.0), call_of(1.0, None), False),
        (call_of(1.0, mode="loss"), call_of(1.0, mode="logits"), False),
        (call_of(1.0, None, step=3), call_of(2.0, step=4), True),
    ],
)
def test_a_call_tells_of_calls_of_its_own_form(one: MicroBatch, other: MicroBatch, alike: bool) -> None:
    kinds = OutputKinds()
    kinds.learn(one, torch.zeros(()))
    assert (kinds.get(other) is not None) is alike


def test_strings_that_are_data_are_not_learned_one_by_one() -> None:
    kinds = OutputKinds()
    for number in range(100):
        if kinds.get(call := call_of(name=f"sample {number}")) is None:
            learned = number
            kinds.learn(call, torch.zeros(()))
    assert 2 <= learned < 50


def test_a_tensor_that_is_given_twice_is_one_on_the_device_and_not_the_caller_s() -> None:
    ids = torch.arange(3)
    args, kwargs = CallInputs((ids,), {"labels": ids}, copies_tensors=True).mapped(torch.clone)
    assert args[0] is kwargs["labels"] and args[0] is not ids
    assert torch.equal(args[0], ids)
