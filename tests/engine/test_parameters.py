"""What people do to parameters of a model in training, against plain PyTorch: equal, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harmony_ds import CallChangedError, ModelError, OptimizerError, UnsupportedError, UsageError
from tests.cover import pairs
from tests.engine.drive import adamw, config_of, engine_for, sgd
from tests.oracle import assert_same


class Net(nn.Module):
    """Blocks, and a head whose loss is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        logits: Tensor = self.head(inputs)
        return logits if targets is None else F.cross_entropy(logits, targets)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 8, generator=generator), torch.randint(0, 4, (2,), generator=generator)


HARMONY = [{"pack_layers": 1}, {"pack_layers": 1, "residency": 2}]
Act = Callable[[Any], None]


def in_place(model: Net) -> None:
    with torch.no_grad():
        model.blocks[1].weight.mul_(0.5)
        model.head.bias += 0.25
        model.head.weight[0] = 0.0


def through_data(model: Net) -> None:
    model.head.weight.data = torch.full((4, 8), 0.1)


def behind_its_back(model: Net) -> None:
    model.blocks[0].weight.data.clamp_(-0.1, 0.1)
    model.head.bias.detach().add_(0.5)


def as_a_vector(model: Net) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.9, model.parameters())


def as_a_state_dict(model: Net) -> None:
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()})


def initialized_again(model: Net) -> None:
    torch.manual_seed(3)
    nn.init.normal_(model.head.weight, std=0.02)


WRITES = [in_place, through_data, as_a_vector, as_a_state_dict, initialized_again]


@pytest.mark.parametrize(("write", "middle", "harmony"), pairs(WRITES, [False, True], HARMONY))
def test_what_is_written_into_parameters_counts(write: Act, middle: bool, harmony: Any) -> None:
    plain, model = net(), net()
    optimizer = adamw(plain.parameters())
    with engine_for(model, adamw, config_of(2, None, harmony)) as engine:
        for step in range(3):
            for i in range(2):
                engine.backward(engine(*batch(2 * step + i)))
                (plain(*batch(2 * step + i)) / 2).backward()
                if middle and i == 0:
                    write(model)
                    write(plain)
                engine.step()
            optimizer.step()
            optimizer.zero_grad()
            if not middle:
                write(model)
                write(plain)
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize("harmony", HARMONY, ids=["swapped", "resident"])
def test_what_is_written_through_data_between_steps_counts(harmony: Any) -> None:
    plain, model = net(), net()
    optimizer = adamw(plain.parameters())
    with engine_for(model, adamw, config_of(1, None, harmony)) as engine:
        for step in range(3):
            engine.train_batch([batch(step)])
            plain(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            behind_its_back(model)
            behind_its_back(plain)
    assert_same(model, plain, bitwise=True)


def test_parameters_kept_from_before_a_step_show_its_update() -> None:
    plain, model = net(), net()
    optimizer = adamw(plain.parameters())
    with engine_for(model, adamw, config_of(1, 1.0, {"pack_layers": 1})) as engine:
        kept = list(model.parameters())
        for step in range(3):
            engine.train_batch([batch(step)])
            plain(*batch(step)).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert all(torch.equal(p, q) for p, q in zip(kept, plain.parameters(), strict=True))


@pytest.mark.parametrize("harmony", HARMONY)
@pytest.mark.parametrize(
    "keep",
    [lambda model: model.head.weight.data, lambda model: model.state_dict()["head.weight"]],
    ids=["data", "state dict"],
)
def test_in_bf16_the_master_follows_what_is_written_into_memory_that_was_kept(
    keep: Callable[[nn.Module], Tensor], harmony: Any
) -> None:
    found = []
    for early in (True, False):
        model = net()
        with engine_for(model, sgd, config_of(1, None, harmony, bf16={"enabled": True})) as engine:
            kept = keep(model) if early else None
            for number in range(4):
                if number == 2:
                    (keep(model) if kept is None else kept).mul_(0.5)
                inputs, targets = batch(number)
                engine.backward(engine(inputs.bfloat16(), targets))
                engine.step()
            found.append({name: weight.float() for name, weight in model.state_dict().items()})
    assert_same(found[0], found[1], bitwise=True)


def test_in_bf16_what_is_clamped_by_hand_is_the_master() -> None:
    model, masters = net(), {name: p.detach().clone() for name, p in net().named_parameters()}
    with engine_for(model, sgd, config_of(1, None, {"pack_layers": 1}, bf16={"enabled": True})) as engine:
        for _ in range(2):
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.05, 0.05)
            engine.train_batch([(batch(0)[0].bfloat16(), batch(0)[1])])
    for name, p in model.named_parameters():
        assert p.abs().max() < 0.06, name
        assert not torch.equal(p, masters[name].bfloat16())


@pytest.mark.parametrize("harmony", HARMONY, ids=["swapped", "resident"])
def test_freezing_and_thawing_between_steps(harmony: Any) -> None:
    plain, model = net(), net()
    optimizer = adamw(plain.parameters())
    with engine_for(model, adamw, config_of(1, None, harmony)) as engine:
        for step in range(4):
            for one in (plain, model):
                one.blocks[0].requires_grad_(step >= 2)
                one.head.bias.requires_grad_(step != 1)
            engine.train_batch([batch(step)])
            plain(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain, bitwise=True)


# ---- refused


def assign(model: Net) -> None:
    model.head.weight = nn.Parameter(torch.zeros(4, 8))


def other_dtype(model: Net) -> None:
    model.half().float()


def other_shape(model: Net) -> None:
    model.head.weight.data = torch.zeros(5, 8)


def load_by_assignment(model: Net) -> None:
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)


def post_accumulate(model: Net) -> None:
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)


REFUSED = [
    (assign, ModelError, "'weight' is assigned"),
    (other_dtype, ModelError, r"blocks\.0\.weight is to become .*float16"),
    (other_shape, ModelError, r"head\.weight is to become \(5, 8\)"),
    (load_by_assignment, UnsupportedError, "assign=True"),
    (post_accumulate, UnsupportedError, "register_post_accumulate_grad_hook"),
]


@pytest.mark.parametrize(("act", "kind", "message"), REFUSED)
def test_what_would_detach_a_parameter_is_refused_and_changes_nothing(act: Act, kind: Any, message: str) -> None:
    plain, model = net(), net()
    optimizer = sgd(plain.parameters())
    with engine_for(model, sgd, config_of(1, None, {"pack_layers": 1})) as engine:
        for step in range(2):
            engine.train_batch([batch(step)])
            plain(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(kind, match=message):
                act(model)
            assert_same(model, plain, bitwise=True)


def test_a_parameter_whose_memory_was_exchanged_is_refused_by_the_next_call() -> None:
    model = net()
    with engine_for(model, sgd, config_of(1)) as engine:
        engine.train_batch([batch(0)])
        with torch.no_grad():
            model.head.weight.set_(torch.zeros(4, 8))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(ModelError, match=r"head\.weight has been given other memory"):
            engine.train_batch([batch(1)])
        assert_same(model, before, bitwise=True)


def test_thawing_what_was_frozen_at_the_start_is_refused() -> None:
    model = net()
    model.head.requires_grad_(False)
    with engine_for(model, sgd, config_of(1)) as engine:
        engine.train_batch([batch(0)])
        with pytest.raises(UnsupportedError, match=r"head\.weight is not trained by this engine"):
            model.requires_grad_(True)


def test_a_parameter_group_that_is_added_later_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    with engine_for(model, lambda _: optimizer, config_of(1)) as engine:
        engine.train_batch([batch(0)])
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.add_param_group({"params": list(model.head.parameters())})
        with pytest.raises(OptimizerError, match=r"hold \[6, 2\] parameters, and held \[6\]"):
            engine.train_batch([batch(1)])
        assert_same(model, before, bitwise=True)


def test_writing_while_a_micro_batch_waits_for_its_backward_is_refused() -> None:
    model = net()
    with engine_for(model, sgd, config_of(1)) as engine:
        loss = engine(*batch(0))
        assert model.head.weight.data.norm() > 0.0
        assert len(model.state_dict()) == 8
        with torch.no_grad(), pytest.raises(UsageError, match=r"head\.weight is about to be changed"):
            model.head.weight.zero_()
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize(
    "alias", [lambda p: p.data, lambda p: p.detach(), lambda p: torch.from_numpy(p.detach().numpy())]
)
def test_writing_behind_a_parameters_back_while_micro_batches_wait_is_refused(alias: Callable[[Any], Tensor]) -> None:
    model = net()
    with engine_for(model, sgd, config_of(1)) as engine:
        engine.train_batch([batch(0)])
        engine.backward(engine(*batch(1)))
        alias(model.head.weight).mul_(2.0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(CallChangedError, match=r"head\.weight was changed through \.data"):
            engine.step()
        assert_same(model, before, bitwise=True)
        engine.train_batch([batch(1)])


@pytest.mark.parametrize("harmony", HARMONY, ids=["swapped", "resident"])
def test_data_changed_in_place_and_set_lets_those_that_wait_run_first(harmony: Any) -> None:
    """`p.data *= 2` writes before it says so, as PEFT's merge_adapter does."""
    plain, model = net(), net()
    optimizer = sgd(plain.parameters())
    with engine_for(model, sgd, config_of(3, None, harmony)) as engine:
        losses = []
        for i in range(6):
            for one in (plain, model):
                if i % 3 == 1:
                    one.head.weight.data *= 0.5
            expected = plain(*batch(i))
            (expected / 3).backward()
            losses.append((engine(*batch(i)), expected.detach()))
            engine.backward(losses[-1][0])
            engine.step()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(loss.detach() + 0, wanted) for loss, wanted in losses)
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize("harmony", HARMONY, ids=["swapped", "resident"])
def test_reading_parameters_in_bf16_changes_nothing(harmony: Any) -> None:
    def train(look: bool) -> Net:
        model = net()
        with engine_for(model, adamw, config_of(1, 1.0, harmony, bf16={"enabled": True})) as engine:
            for step in range(4):
                engine.train_batch([(batch(step)[0].bfloat16(), batch(step)[1])])
                if look:
                    assert all(p.detach().isfinite().all() for p in model.parameters())
        return model

    assert_same(train(True), train(False), bitwise=True)
