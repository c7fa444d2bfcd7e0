"""`harmony.micro_batch`: rows of a micro-batch go through layers a few at a time, and the gradients stay what they are.

The reference is plain PyTorch over whole micro-batches. Sums over rows are made slice by slice, so that gradients agree
to 1e-6 relative (in the norm of each parameter's gradient), not bit by bit.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.errors import DoesNotFitError
from harmony_ds.profiling.measurement import Measurement
from harmony_ds.profiling.row_probe import RowProbe
from harmony_ds.profiling.sample import Sample
from harmony_ds.scheduler.costs import CostTable
from tests.cover import spread
from tests.engine.drive import (
    EVERY_FAMILY,
    adamw,
    config_of,
    engine_for,
    family,
    loop,
    loop_with,
    means_of,
    seed_of,
    train_groups,
)
from tests.families import Batch, Family
from tests.oracle import assert_same, train_plainly

pytestmark = pytest.mark.fixed_times

SIZES = ((4, 2), (6, 4), (8, 3))
ROWS = {(4, 2): (8, 5), (6, 4): (12, 7), (8, 3): (16, 9)}
"""Micro-batches of a group: one that may come out even, and one that does not."""
TOLERANCE = 1e-6
LLAMA = family("llama")
LOOSE = {
    # Batch normalization after the first convolution makes nearly all of its gradient cancel out.
    "resnet": 1e-5
}


def widened(batch: Batch, rows: int) -> Batch:
    """`batch` with so many rows, each repetition shifted along the row."""
    own = next(t.shape[0] for t in batch.values() if isinstance(t, Tensor) and t.dim())

    def wide(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != own:
            return value
        return torch.stack(
            [value[r % own].roll(r // own, 0) if value.dim() > 1 else value[r % own] for r in range(rows)]
        )

    return {key: wide(value) for key, value in batch.items()}


def group_of(one: Family, rows: tuple[int, ...]) -> list[Batch]:
    return [widened(one.batch(i), n) for i, n in enumerate(rows)]


def summing(parameters: Any) -> torch.optim.Optimizer:
    """Changes nothing, and keeps the sum of all gradients as its momentum."""
    return torch.optim.SGD(parameters, lr=0.0, momentum=1.0)


def gradients_in(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    found = {name: optimizer.state.get(p, {}).get("momentum_buffer") for name, p in model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        # Some gradients are nothing but rounding (attention key biases).
        assert (actual[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-7, name


def slices(forward: int, backward: int, **more: Any) -> dict[str, Any]:
    return {"micro_batch": {"forward": forward, "backward": backward}, **more}


def plain_gradients(one: Family, groups: list[list[Batch]]) -> tuple[dict[str, Tensor], list[float]]:
    model = one.build(0.0)
    optimizer = summing(model.parameters())
    losses = train_plainly(model, groups, optimizer, clip=None, seed_of=seed_of)
    return gradients_in(optimizer, model), means_of(losses)


@pytest.mark.parametrize(
    ("one", "sizes"),
    spread(EVERY_FAMILY, SIZES),
    ids=lambda value: value.name if isinstance(value, Family) else f"{value[0]}-{value[1]}",
)
def test_gradients_are_those_of_whole_micro_batches(one: Family, sizes: tuple[int, int]) -> None:
    groups = [group_of(one, ROWS[sizes])]
    expected, losses = plain_gradients(one, groups)
    model = one.build(0.0)
    with engine_for(model, summing, config_of(2, harmony=slices(*sizes, pack_layers=2))) as engine:
        actual = train_groups(engine, groups)
        assert_close(gradients_in(engine.optimizer, model), expected, LOOSE.get(one.name, TOLERANCE))
    assert actual == pytest.approx(losses, rel=1e-6)


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
@pytest.mark.parametrize("look", [lambda i: False, lambda i: True], ids=["never", "every"])
def test_the_familiar_loop_is_cut_too(look: Any) -> None:
    groups = [group_of(LLAMA, (8, 5))]
    expected, losses = plain_gradients(LLAMA, groups)
    model = LLAMA.build(0.0)
    with engine_for(model, summing, config_of(2, harmony=slices(4, 2))) as engine:
        actual = loop(engine, groups, look)
        assert_close(gradients_in(engine.optimizer, model), expected)
    assert means_of(actual) == pytest.approx(losses, rel=1e-6)


def test_a_loss_of_the_users_own_is_over_the_whole_micro_batch() -> None:
    """No mean over rows or items is assumed: here rows compete with each other."""
    batch = {key: value for key, value in group_of(LLAMA, (8,))[0].items() if key != "labels"}

    def contrast(outputs: Any) -> Tensor:
        pooled = nn.functional.normalize(outputs.logits.mean(1), dim=-1)
        return nn.functional.cross_entropy(pooled @ pooled.T / 0.1, torch.arange(pooled.shape[0]))

    plain = LLAMA.build(0.0)
    reference = summing(plain.parameters())
    train_plainly(plain, [[batch]], reference, clip=None, seed_of=seed_of, loss_of=contrast)
    model = LLAMA.build(0.0)
    with engine_for(model, summing, config_of(1, harmony=slices(3, 2))) as engine:
        engine.train_batch(iter([batch]), loss_fn=contrast)
        # Through so hard a softmax, rounding of the logits grows a hundredfold.
        assert_close(gradients_in(engine.optimizer, model), gradients_in(reference, plain), 1e-5)


def test_rows_of_several_lengths_are_grouped_with_a_loss_of_the_users_own() -> None:
    """What fewer rows give, by which rows are found, is not taken for what the micro-batch gives."""
    batches = [{key: value[:, :length] for key, value in one.items()} for one, length in _lengths()]

    def loss_of(call: Any, one: Batch) -> Tensor:
        logits = call(input_ids=one["input_ids"]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), one["input_ids"].flatten())

    with engine_for(LLAMA.build(0.0), summing, config_of(2, harmony=slices(3, 2))) as engine:
        _, ratios = loop_with(engine, batches, loss_of)
    assert ratios[1:] == [1.0, 1.0]


def _lengths() -> list[tuple[Batch, int]]:
    return list(zip(group_of(LLAMA, (6, 4, 5, 6, 3, 6)), (8, 5, 7, 8, 4, 6), strict=True))


def test_evaluation_is_cut_and_gives_the_same_loss() -> None:
    batches = group_of(LLAMA, (8, 5))
    with engine_for(LLAMA.build(0.0), summing, config_of(2, harmony=slices(4, 2))) as engine:
        engine.train_batch(iter(batches))
        with torch.no_grad():
            expected = torch.stack([engine.module.eval()(**batch).loss for batch in batches]).mean()
        engine.train()
        assert engine.eval_batch(iter(batches)).item() == pytest.approx(expected.item(), rel=1e-6)


class Dropping(nn.Module):
    """Linear in its weights: whatever is dropped, its sum is the scalar product of weights and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.5, self.training)


class Centering(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize("first_in_training", [True, False])
def test_recomputed_slices_have_the_dropout_of_their_forward_pass(first_in_training: bool) -> None:
    x, model = torch.rand(8, 16), nn.Sequential(Dropping())
    with engine_for(model, summing, config_of(1, harmony=slices(8, 3, pack_layers=1))) as engine:
        model.train(first_in_training)
        engine.train_batch(iter([x]), torch.sum)
        before = gradients_in(engine.optimizer, model)["0.weight"].clone()
        model.train()  # from now on random numbers are drawn, which the first measurement may not have seen
        loss = engine.train_batch(iter([x]), torch.sum)
        gradient = gradients_in(engine.optimizer, model)["0.weight"] - before
        assert loss.item() == pytest.approx((gradient * model[0].weight).sum().item(), rel=1e-5)
        assert not torch.allclose(gradient, x.sum(0))


def test_layers_whose_rows_look_at_each_other_are_not_cut_and_named(caplog: pytest.LogCaptureFixture) -> None:
    x, model = torch.randn(8, 16), nn.Sequential(Centering(16, 16), Centering(16, 16))
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    with caplog.at_level(logging.WARNING), engine_for(model, summing, config_of(1, harmony=slices(2, 2))) as engine:
        engine.train_batch(iter([x]), lambda outputs: outputs.square().mean())
        actual = gradients_in(engine.optimizer, model)
    assert_close(actual, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    assert "layer 0 runs with whole micro-batches: its rows depend on each other" in caplog.text


def test_sizes_as_large_as_the_micro_batch_change_nothing() -> None:
    groups = [[LLAMA.batch(i) for i in range(2)] for _ in range(2)]
    models = [LLAMA.build(0.0) for _ in range(3)]
    for model, harmony in zip(models, ({}, slices(2, 2), slices(9, 4)), strict=True):
        with engine_for(model, adamw, config_of(2, harmony=harmony)) as engine:
            train_groups(engine, groups)
        assert_same(model, models[0], bitwise=True)


def test_auto_takes_slices_where_whole_micro_batches_do_not_fit() -> None:
    groups = [group_of(LLAMA, (16, 16))]
    expected, losses = plain_gradients(LLAMA, groups)
    with engine_for(
        LLAMA.build(0.0), summing, config_of(2, harmony=slices(1, 1, residency="off", pack_layers=1))
    ) as engine:
        train_groups(engine, groups)
        small = engine.memory_report().planned_peak_bytes
    budget = {"device_memory_gib": (small + 2000) / 2**30}
    whole = engine_for(LLAMA.build(0.0), summing, config_of(2, harmony={"micro_batch": 16, "tokens": "off", **budget}))
    with whole as engine, pytest.raises(DoesNotFitError):
        train_groups(engine, groups)
    model = LLAMA.build(0.0)
    with engine_for(model, summing, config_of(2, harmony={"micro_batch": "auto", **budget})) as engine:
        assert train_groups(engine, groups) == pytest.approx(losses, rel=1e-6)
        assert engine.plan is not None
        assert 0 < engine.plan.policy.backward_rows < 16
        assert engine.memory_report().device_peak_bytes <= small + 2000
        assert_close(gradients_in(engine.optimizer, model), expected)


def test_where_three_rows_do_not_fit_two_show_which_layers_can_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int]] = []
    own_probe = RowProbe.probe

    def probe(self: RowProbe, sample: Sample, rows: tuple[int, int], unlayered: tuple[str, ...]) -> None:
        tried.append(rows)
        if rows[1] == 3:
            raise torch.OutOfMemoryError("three rows do not fit.")
        own_probe(self, sample, rows, unlayered)

    monkeypatch.setattr(RowProbe, "probe", probe)
    with engine_for(LLAMA.build(0.0), summing, config_of(1, harmony=slices(2, 2))) as engine:
        train_groups(engine, [group_of(LLAMA, (6,))])
        assert tried[:2] == [(2, 3), (1, 2)]
        assert engine._state.planner.rows.cuts


def test_rows_that_could_not_be_found_for_want_of_memory_are_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with smaller tiles of tokens; until then, nothing fits."""
    own_probe, own_measure, is_short = RowProbe.probe, Measurement.measure, True

    def probe(self: RowProbe, *args: Any) -> None:
        if is_short:
            raise torch.OutOfMemoryError("few rows do not fit.")
        own_probe(self, *args)

    def measure(self: Measurement, sample: Sample) -> CostTable:
        if is_short and sample.rows > 3:
            raise torch.OutOfMemoryError("all rows do not fit.")
        return own_measure(self, sample)

    monkeypatch.setattr(RowProbe, "probe", probe)
    monkeypatch.setattr(Measurement, "measure", measure)
    with engine_for(LLAMA.build(0.0), summing, config_of(1, harmony=slices(2, 2))) as engine:
        with pytest.raises(DoesNotFitError):
            train_groups(engine, [group_of(LLAMA, (6,))])
        is_short = False
        train_groups(engine, [group_of(LLAMA, (6,))])
        assert engine._state.planner.rows.cuts


def test_a_micro_batch_size_of_auto_is_a_whole_batch_in_slices() -> None:
    groups = [group_of(LLAMA, (13,))]
    expected, losses = plain_gradients(LLAMA, groups)
    model = LLAMA.build(0.0)
    config = config_of(1, train_batch_size=13, train_micro_batch_size_per_gpu="auto")
    del config["gradient_accumulation_steps"]
    with engine_for(model, summing, config) as engine:
        assert engine.train_micro_batch_size_per_gpu() == 13
        assert engine.gradient_accumulation_steps() == 1
        assert train_groups(engine, groups) == pytest.approx(losses, rel=1e-6)
        assert_close(gradients_in(engine.optimizer, model), expected)


def test_times_of_all_sizes_are_kept_in_the_profile(tmp_path: Any) -> None:
    groups = [group_of(LLAMA, (8, 8))]
    path = tmp_path / "profile.json"
    plans = []
    for _ in range(2):
        harmony = {"micro_batch": "auto", "profile": str(path)}
        with engine_for(LLAMA.build(0.0), summing, config_of(2, harmony=harmony)) as engine:
            train_groups(engine, groups)
            plans.append(engine.plan)
            text = path.read_text()
    assert path.read_text() == text
    assert plans[0] == plans[1]
