"""train_batch with a function that calls the engine itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine, UsageError
from tests.engine.drive import config_of, engine_for, loop_plainly, means_of, sgd
from tests.engine.test_shared_losses import ACCUMULATION, LOSSES, Encoder, assert_close, data
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times


@pytest.mark.parametrize("name", ["siamese", "triplet", "r_drop", "dpo", "with_a_teacher"])
def test_a_function_of_engine_and_batch_is_grouped_and_exact(name: str) -> None:
    """To rounding: the calls of a function share a random stream, and a weight's gradients add up call by call."""
    plain, model, batches = Encoder(0.2), Encoder(0.2), data()
    losses = loop_plainly(plain, batches, ACCUMULATION, LOSSES[name], seeded=True)
    expected = means_of([losses[first : first + ACCUMULATION] for first in range(0, len(losses), ACCUMULATION)])
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        loader = iter(batches)
        found = []
        for _ in expected:
            found.append(engine.train_batch(loader, compute_loss=LOSSES[name]).item())
            assert engine.swap_report().ratio <= 1.0  # less where a teacher's pass needs no backward pass
    assert found == pytest.approx(expected, rel=1e-6)
    assert_close(model, plain)


def test_a_function_may_look_and_may_run_a_reference_without_gradients() -> None:
    """The passes of the reference are grouped, too."""
    seen = []

    def compute_loss(engine: HarmonyEngine, batch: dict[str, Tensor]) -> Tensor:
        assert isinstance(engine, (HarmonyEngine, nn.Module))
        with torch.no_grad():
            reference = engine(batch["x"])
        outputs = engine(batch["x"] + 1.0)
        loss = (outputs - reference).square().mean()
        seen.append(loss.item())
        return loss

    plain, model = Encoder(), Encoder()
    batches = [{"x": batch[0]} for batch in data()[:4]]
    loop_plainly(plain, batches, 2, compute_loss)
    with engine_for(model, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        for step in range(2):
            engine.train_batch(batches[2 * step : 2 * step + 2], compute_loss=compute_loss)
            assert engine.swap_report().ratio == 1.0
    assert_same(model, plain, bitwise=True)
    assert seen[0] == seen[4]


def test_both_kinds_of_functions_are_refused() -> None:
    with (
        engine_for(Encoder(), sgd, config_of(1)) as engine,
        pytest.raises(UsageError, match="not both"),
    ):
        engine.train_batch(data()[:1], lambda outputs: outputs.mean(), compute_loss=LOSSES["siamese"])


def test_a_function_that_calls_backward_is_refused() -> None:
    def compute_loss(engine: HarmonyEngine, batch: list[Tensor]) -> Tensor:
        return engine.backward(engine(batch[0]).square().mean())

    model = Encoder()
    with engine_for(model, sgd, config_of(1)) as engine:
        with pytest.raises(UsageError, match="return the loss instead"):
            engine.train_batch(data()[:1], compute_loss=compute_loss)
        engine.train_batch(data()[:1], compute_loss=LOSSES["siamese"])


def test_passes_without_gradients_within_a_step_are_reported_apart() -> None:
    model = Encoder()
    with engine_for(model, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        for step, references in enumerate((0, 2, 1, 0)):
            for place, batch in enumerate(data()[:2]):
                reference = torch.zeros(())
                if place < references:
                    with torch.no_grad():
                        reference = engine(batch[1])
                engine.backward((engine(batch[0]) - reference).square().mean())
                engine.step()
            report = engine.swap_report()
            nbytes = 5 * 256  # layers, in memory that is aligned
            assert report.ratio == 1.0
            assert (report.beside_calls, report.beside_bytes) == (references, references * nbytes)
            assert report.beside_ratio == pytest.approx(references * nbytes / report.lower_bound_bytes)
            assert ("without gradients" in str(report)) is bool(references), step
        assert "beside" not in str(report)


def test_calls_in_a_streaming_context_are_the_engines_own() -> None:
    """They enter the ds_config's autocast, and copy their arguments."""
    model, x = Encoder(), data()[0][0]
    config = config_of(1, None, {"pack_layers": 1}, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    with engine_for(model, sgd, config) as engine:
        with torch.no_grad():
            expected = engine(x)
        with engine.streaming():
            found = engine(x)
        assert torch.equal(found, expected)
        assert not torch.equal(found.float(), model(x))
