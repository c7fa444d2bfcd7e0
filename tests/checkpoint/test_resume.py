"""Training, saving, and going on in an engine where everything was different, is training on: bit for bit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.dataloader import RepeatingLoader

import harmony_ds
from tests.checkpoint.runs import Setup, assert_equal, engine_of, masters_of, state_of, train
from tests.inside import assembly_of
from tests.oracle import loss_in

pytestmark = pytest.mark.fixed_times

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1, "loss_scale_window": 2}}
CLIP = {"gradient_clipping": 0.5}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}}}


def named(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True)


def two_groups(parameters: list[Any]) -> torch.optim.Optimizer:
    slow = [p for p in parameters if p.dim() < 2]
    fast = [p for p in parameters if p.dim() >= 2]
    return torch.optim.AdamW([{"params": fast, "lr": 1e-2}, {"params": slow, "lr": 1e-3, "weight_decay": 0.0}])


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)


RESIDENT = {"residency": 2, "pack_layers": 1}
SETUPS = {
    "fp32": Setup(),
    "fp32, clipped: updates are under way when it is saved": Setup(config=CLIP),
    "bf16": Setup(config=BF16),
    "bf16, clipped, DeepSpeed's warm-up": Setup(config=BF16 | CLIP | WARMUP),
    "fp16 with overflows and growth": Setup(config=FP16),
    "torch_adam": Setup(optimizer=None, config=BF16 | named("AdamW", lr=1e-2, torch_adam=True)),
    "DeepSpeedCPUAdam": Setup(optimizer=None, config=BF16 | CLIP | named("AdamW", lr=1e-2)),
    "SGD with momentum, cosine": Setup(optimizer=momentum, scheduler=cosine),
    "two parameter groups": Setup(optimizer=two_groups, config=BF16),
    "resident packs": Setup(harmony=RESIDENT),
    "resident packs, bf16, clipped": Setup(config=BF16 | CLIP, harmony=RESIDENT),
    "tied weights": Setup(family="gpt2", dropout=0.0),
    "frozen parameters": Setup(frozen="layers.0", config=BF16),
    "buffers that change": Setup(family="BatchNormNet"),
}


def interrupted(setup: Setup, folder: Path, later: Setup | None = None, **options: Any) -> tuple[dict[str, Any], list]:
    """Train three steps, save, and train three more in an engine that began otherwise."""
    with engine_of(setup) as engine:
        losses = train(engine, setup, range(3))
        assert engine.save_checkpoint(folder, client_state={"epoch": 1}) is True
    later = later or setup
    with engine_of(later, fresh=False) as engine:
        assert engine.load_checkpoint(folder, **options) == (str(folder / "global_step3"), {"epoch": 1})
        losses += train(engine, later, range(3, 6))
        return state_of(engine), losses


def straight(setup: Setup) -> tuple[dict[str, Any], list]:
    with engine_of(setup) as engine:
        return_losses = train(engine, setup, range(6))
        return state_of(engine), return_losses


@pytest.mark.parametrize("name", SETUPS)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    setup = SETUPS[name]
    expected, losses = straight(setup)
    actual, resumed_losses = interrupted(setup, tmp_path)

    assert resumed_losses == losses
    assert_equal(actual, expected)
    if name.startswith("fp16"):
        assert expected["skipped_steps"] > 0


@pytest.mark.parametrize(
    "name", ["fp32, clipped: updates are under way when it is saved", "resident packs, bf16, clipped"]
)
def test_an_engine_goes_back_to_what_it_saved(name: str, tmp_path: Path) -> None:
    setup = SETUPS[name]
    expected, losses = straight(setup)
    with engine_of(setup) as engine:
        resumed = train(engine, setup, range(3))
        engine.save_checkpoint(tmp_path)
        train(engine, setup, range(7, 10))  # what is under way, and on the device, is not what is saved
        engine.load_checkpoint(tmp_path)
        resumed += train(engine, setup, range(3, 6))
        assert resumed == losses
        assert_equal(state_of(engine), expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Setup(harmony={"pack_layers": 1}), Setup(harmony={"pack_layers": 3})),
        (Setup(harmony=RESIDENT), Setup(harmony={"residency": "off"})),
        (Setup(harmony={"residency": "off"}), Setup(harmony=RESIDENT)),
    ],
    ids=["other packs", "resident, then not", "not resident, then so"],
)
def test_another_plan_goes_on_bit_for_bit(before: Setup, after: Setup, tmp_path: Path) -> None:
    expected, losses = straight(before)
    actual, resumed_losses = interrupted(before, tmp_path, later=after)

    assert resumed_losses == losses
    assert_equal(actual, expected)


def test_another_accumulation_goes_on_as_if_it_had_been_changed_on_the_way(tmp_path: Path) -> None:
    """Three steps of two micro-batches, then three of four: in one engine, and in two."""
    setup, later = Setup(config=BF16 | CLIP), Setup(config=BF16 | CLIP, accumulation=4)
    with engine_of(setup) as engine:
        train(engine, setup, range(3))
        engine.save_checkpoint(tmp_path)
        straight_losses = []
        for step in range(3, 6):  # a longer iterator is what another accumulation comes to
            engine.set_train_batch_size(4 * engine.train_micro_batch_size_per_gpu())
            straight_losses += train(engine, setup, [step], micro_batches=4)
        expected = state_of(engine)
    with engine_of(later, fresh=False) as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.micro_steps == 12
        losses = train(engine, later, range(3, 6), micro_batches=4)
        actual = state_of(engine)

    assert losses == straight_losses
    for state in (actual, expected):
        state.pop("micro_steps"), state.pop("global_samples")
    assert_equal(actual, expected)


def test_another_dtype_of_compute_goes_on_from_the_same_masters(tmp_path: Path) -> None:
    half, single = Setup(config=BF16), Setup()
    with engine_of(half) as engine:
        train(engine, half, range(2))
        engine.save_checkpoint(tmp_path / "half")
        masters = masters_of(engine)
        moments = {k: v for k, v in state_of(engine).items() if k.startswith("exp_avg")}
    with engine_of(single, fresh=False) as engine:
        engine.load_checkpoint(tmp_path / "half")
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter, masters[name])
        assert_equal({k: v for k, v in state_of(engine).items() if k.startswith("exp_avg")}, moments)
        engine.save_checkpoint(tmp_path / "single")
    with engine_of(half, fresh=False) as engine:
        engine.load_checkpoint(tmp_path / "single")
        assert_equal(masters_of(engine), masters)
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter, masters[name].to(torch.bfloat16))


def test_other_weights_than_those_of_the_masters_are_kept(tmp_path: Path) -> None:
    setup = Setup(config=BF16)
    with engine_of(setup) as engine:
        train(engine, setup, range(1))
        engine.module.lm_head.weight.data.zero_()  # what the user wrote holds until the next update
        engine.save_checkpoint(tmp_path)
        expected = state_of(engine)
    with engine_of(setup, fresh=False) as engine:
        engine.load_checkpoint(tmp_path)
        assert_equal(state_of(engine), expected)


@pytest.mark.parametrize("kinds", [("torch_adam", "DeepSpeed"), ("DeepSpeed", "torch_adam")])
def test_adams_take_each_others_state(kinds: tuple[str, str], tmp_path: Path) -> None:
    options = {"torch_adam": named("AdamW", lr=1e-2, torch_adam=True), "DeepSpeed": named("AdamW", lr=1e-2)}
    before, after = (Setup(optimizer=None, config=options[kind]) for kind in kinds)
    expected, losses = straight(before)
    actual, resumed_losses = interrupted(before, tmp_path, later=after)

    assert resumed_losses == pytest.approx(losses, rel=1e-5)
    for name in expected:
        if name.startswith("weight"):
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-5)


class Counting(torch.nn.Module):
    """A layer with state of its own that is no tensor of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calibrated = torch.nn.Linear(2, 2), {"scale": 1.0}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs)

    def get_extra_state(self) -> dict[str, float]:
        return self.calibrated

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.calibrated = state


def test_the_extra_state_of_modules_comes_back(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "harmony": {"device": "cpu"}, **named("SGD", lr=1e-2)}
    saved, loaded = (torch.nn.Sequential(Counting(), torch.nn.BatchNorm1d(2)) for _ in range(2))
    saved[0].calibrated = {"scale": 3.0}
    engine, *_ = harmony_ds.initialize(model=saved, config=config)
    engine.save_checkpoint(tmp_path, tag="a")
    engine.destroy()
    engine, *_ = harmony_ds.initialize(model=loaded, config=config)
    engine.load_checkpoint(tmp_path, tag="a")
    engine.destroy()
    assert loaded[0].calibrated == {"scale": 3.0}
    assert_equal(dict(loaded.state_dict()), dict(saved.state_dict()))


def test_the_familiar_loop_goes_on_at_its_boundary(tmp_path: Path) -> None:
    setup = Setup(config=CLIP)

    def loop(engine: Any, micro_batches: range) -> None:
        for index in micro_batches:
            engine.backward(engine(**setup.one.batch(index)).loss)
            engine.step()

    with engine_of(setup) as engine:
        loop(engine, range(8))
        expected = state_of(engine)
    with engine_of(setup) as engine:
        loop(engine, range(5))  # the fifth micro-batch waits for its step
        engine.save_checkpoint(tmp_path)
    with engine_of(setup, fresh=False) as engine:
        loop(engine, range(20, 21))  # what is queued is forgotten
        engine.load_checkpoint(tmp_path)
        assert (engine.micro_steps, engine.global_steps) == (4, 2)
        loop(engine, range(4, 8))
        assert_equal(state_of(engine), expected)


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
@pytest.mark.parametrize("way", ["queued", "read", "a loss of the program's"])
def test_buffers_are_saved_as_they_were_before_queued_forward_passes(way: str, tmp_path: Path) -> None:
    setup = Setup(family="BatchNormNet", accumulation=3)

    def loop(engine: Any, micro_batches: range) -> None:
        for index in micro_batches:
            outputs = engine(**setup.one.batch(index))
            loss = loss_in(outputs) if way != "a loss of the program's" else outputs.prediction.square().mean()
            if way == "read":
                assert loss.item() > 0
            engine.backward(loss)
            engine.step()

    with engine_of(setup) as engine:
        loop(engine, range(9))
        expected = state_of(engine)
    with engine_of(setup) as engine:
        loop(engine, range(5))
        engine.save_checkpoint(tmp_path)
        loop(engine, range(5, 9))  # saving changes nothing
        assert_equal(state_of(engine), expected)
    with engine_of(setup, fresh=False) as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.micro_steps == 3
        loop(engine, range(3, 9))
        assert_equal(state_of(engine), expected)


def test_saving_changes_nothing_and_leaves_resident_packs_on_the_device(tmp_path: Path) -> None:
    setup = Setup(config=BF16 | CLIP, harmony=RESIDENT)
    expected, losses = straight(setup)
    with engine_of(setup) as engine:
        resumed = []
        for step in range(6):
            resumed += train(engine, setup, [step])
            if step >= 3:
                assert engine.swap_report().host_to_device["resident"] == 0
                assert assembly_of(engine).runtime.resident_packs.nbytes
            engine.save_checkpoint(tmp_path)
        assert_equal(state_of(engine), expected)
    assert resumed == losses


def test_the_engines_own_loader_goes_on_where_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "harmony_ds.status")

    def batches_of(resumed: bool) -> list[list[float]]:
        torch.manual_seed(77 if resumed else 3)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
            "harmony": {"device": "cpu"},
        }
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        rows = torch.arange(11.0)[:, None].expand(11, 2)
        engine, _, loader, _ = harmony_ds.initialize(model=model, training_data=rows, config=config)
        seen: list[list[float]] = []

        def recorded() -> Any:
            for batch in RepeatingLoader(loader):
                seen.append(batch[:, 0].tolist())
                yield (batch,)

        endless = recorded()
        if resumed:
            engine.load_checkpoint(tmp_path)
        for step in range(2 if resumed else 0, 8):
            engine.train_batch(endless, loss_fn=torch.mean)
            if step == 1:
                engine.save_checkpoint(tmp_path)
        drawn = torch.rand(1).item()
        engine.destroy()
        return [*seen, [drawn]]

    straight_batches = batches_of(resumed=False)
    assert "goes on after" not in caplog.text
    assert batches_of(resumed=True) == straight_batches[4:]
    assert "the loader of training_data goes on after 4 batches of its pass, as the saved run took" in caplog.text
    assert len({tuple(batch) for batch in straight_batches[:6]}) == 6
