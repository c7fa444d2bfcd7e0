"""Gradients between backward and step: those of plain PyTorch, and what is put in their place is what is used."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import UsageError
from harmony_ds.model.layer_call import LayerCalls
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.utils import safe_get_full_grad
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, sgd, train_groups, weights_of
from tests.inside import assembly_of
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 3, 4)
RESIDENT = {"pack_layers": 1, "residency": 2}


def plain_gradients(model: nn.Module, group: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    for batch in group:
        (model(**batch).loss / len(group)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def hand_over(engine: Any, group: list[dict[str, Tensor]]) -> None:
    """Forward and backward of a whole group; step() for all micro-batches but the last."""
    for i, batch in enumerate(group):
        engine.backward(engine(**batch).loss)
        if i < len(group) - 1:
            engine.step()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_later_gradients_are_added_to_those_that_were_read_though_the_model_was_measured_in_between(
    clip: float | None,
) -> None:
    """The first step's checks free the device after its first micro-batch has left gradients on resident packs."""
    plain, model = LLAMA.build(0.0), LLAMA.build(0.0)
    gradients = plain_gradients(plain, GROUPS[0])
    harmony = {"pack_layers": 1, "residency": 100}
    with engine_for(model, sgd, config_of(4, clip, harmony)) as engine:
        for place, batch in enumerate(GROUPS[0]):
            engine.backward(engine(**batch).loss)
            if place in (0, 3):
                found = {name: p.grad.clone() for name, p in model.named_parameters()}
            engine.step()
    for name, gradient in gradients.items():
        assert torch.equal(found[name], gradient), name


def test_gradients_that_have_gathered_stay_when_states_are_offloaded() -> None:
    results = []
    for offloads in (False, True):
        model = LLAMA.build(0.0)
        with engine_for(model, adamw, config_of(4, 0.5, RESIDENT)) as engine:
            train_groups(engine, GROUPS[:1])
            hand_over(engine, GROUPS[1])
            assert model.lm_head.weight.grad is not None
            if offloads:
                held = assembly_of(engine).device.allocated_bytes()
                engine.offload_states()
                assert assembly_of(engine).device.allocated_bytes() < held
                engine.reload_states()
            engine.step()
            train_groups(engine, GROUPS[2:])
            results.append((engine.get_global_grad_norm(), model))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1], bitwise=True)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_that_were_set_are_the_programs_again_after_the_step(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that keeps buffers for them may zero these at once, though updates are still under way."""
    reference = LLAMA.build(0.0)
    optimizer = sgd(reference.parameters())
    for parameter in reference.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    if clip is not None:
        nn.utils.clip_grad_norm_(reference.parameters(), clip)
    optimizer.step()
    zeroed, step = threading.Event(), HostOptimizer.step
    monkeypatch.setattr(HostOptimizer, "step", lambda *given: (zeroed.wait(60), step(*given)))
    model = LLAMA.build(0.0)
    with engine_for(model, sgd, config_of(4, clip, {"pack_layers": 1, "residency": "off"})) as engine:
        hand_over(engine, GROUPS[0])
        buffers = [torch.full_like(parameter, 0.25) for parameter in model.parameters()]
        for parameter, buffer in zip(model.parameters(), buffers, strict=True):
            parameter.grad = buffer
        engine.step()
        for buffer in buffers:
            buffer.zero_()
        zeroed.set()
    assert_same(model, reference, bitwise=True)


def test_gradients_in_bf16_may_be_set_as_they_are_read_in_fp32() -> None:
    models = []
    for sets in (False, True):
        model = LLAMA.build(0.0)
        with engine_for(model, adamw, config_of(4, 0.5, bf16={"enabled": True})) as engine:
            for group in GROUPS:
                hand_over(engine, group)
                for parameter in model.parameters():
                    if sets:
                        parameter.grad = parameter.grad * 0.7
                    else:
                        parameter.grad.mul_(0.7)
                engine.step()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
                parameter.grad = None
        models.append(model)
        assert all(parameter.grad_dtype == torch.bfloat16 for parameter in model.parameters())
    assert_same(*models, bitwise=True)


def test_gradients_in_fp16_are_unscaled() -> None:
    expected = plain_gradients(LLAMA.build(0.0), GROUPS[0])
    model = LLAMA.build(0.0)
    with engine_for(model, sgd, config_of(4, None, fp16={"enabled": True, "loss_scale": 64})) as engine:
        hand_over(engine, GROUPS[0])
        for name, parameter in model.named_parameters():
            found = safe_get_full_grad(parameter)
            assert found is not None and found.dtype == torch.float32
            torch.testing.assert_close(found, expected[name], rtol=5e-2, atol=2e-3)


def test_deepspeeds_helper_and_a_parameter_without_gradient() -> None:
    from deepspeed.utils import safe_get_full_grad as theirs

    model = LLAMA.build(0.0)
    model.lm_head.requires_grad_(False)
    with engine_for(model, sgd, config_of(4, 0.5, {"pack_layers": 1})) as engine:
        hand_over(engine, GROUPS[0])
        assert torch.equal(theirs(model.model.norm.weight), safe_get_full_grad(model.model.norm.weight))  # type: ignore[arg-type]
        assert safe_get_full_grad(model.lm_head.weight) is None
        engine.step()


def test_a_micro_batch_is_propagated_back_from_once() -> None:
    model = LLAMA.build(0.0)
    with engine_for(model, sgd, config_of(1)) as engine:
        loss = engine(**GROUPS[0][0]).loss
        engine.backward(loss)
        assert model.lm_head.weight.grad is not None
        with pytest.raises(UsageError, match="propagated back from already"):
            engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("propagated", [0, 2])
def test_a_failure_while_looking_leaves_nothing_behind(propagated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers had been propagated through before the failure counts for nothing afterwards."""
    model, undisturbed = LLAMA.build(0.0), LLAMA.build(0.0)
    config = config_of(1, 0.5, {"pack_layers": 1})
    with engine_for(model, adamw, config) as engine, engine_for(undisturbed, adamw, config) as other:
        for one in (engine, other):
            train_groups(one, [GROUPS[0][:1]])
        engine.backward(engine(**GROUPS[0][1]).loss)
        backward, calls = LayerCalls.backward, itertools.count()

        def fail(*args: Any) -> None:
            if next(calls) == propagated:
                raise RuntimeError("a mishap")
            backward(*args)

        with monkeypatch.context() as patched:
            patched.setattr(LayerCalls, "backward", fail)
            with pytest.raises(RuntimeError, match="a mishap"):
                safe_get_full_grad(model.model.norm.weight)
        assert engine.usable
        assert train_groups(engine, [GROUPS[0][1:2]]) == train_groups(other, [GROUPS[0][1:2]])
        expected = weights_of(undisturbed)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(model).items())


@pytest.mark.parametrize("written", [False, True], ids=["gradient read", "weight written"])
def test_a_forward_pass_that_this_runs_waits_for_the_updates_of_another_engine(
    written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, seen, x, step = nn.Sequential(nn.Linear(2, 2)), [], torch.ones(1, 2), HostOptimizer.step

    class Reader(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(other[0].weight.detach().clone())
            return super().forward(x).sum()

    model = Reader(nn.Linear(2, 2))
    monkeypatch.setattr(HostOptimizer, "step", lambda *given: (time.sleep(0.05), step(*given)))
    with (
        engine_for(other, sgd, config_of(1, 0.5)) as updated,
        engine_for(model, sgd, config_of(2)) as engine,
        torch.no_grad(),
    ):
        for _ in range(2):
            with torch.enable_grad():
                updated.backward(updated(x).sum())
                updated.step()
                engine.backward(engine(x))
            if written:
                model[0].bias.mul_(1.0)
            else:
                assert model[0].bias.grad is not None
            assert torch.equal(seen[-1], other[0].weight)
            engine.step()
