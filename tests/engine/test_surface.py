"""The names of DeepSpeed's engine beside forward, backward and step, where more than its presence matters."""

from __future__ import annotations

import copy
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import harmony_ds
from harmony_ds import BatchError, ConfigError, ModelError, UnsupportedError, UsageError
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, loop, plainly, sgd, train_groups
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 2, 4)
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


class Squares(nn.Module):
    """A loss from two tensors, for data loaders."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.line(inputs) - targets).pow(2).mean()


# ---- batch sizes and boundaries


def test_a_changed_batch_size_is_that_of_the_next_group() -> None:
    groups = [*groups_of(LLAMA, 2, 2), groups_of(LLAMA, 2, 4)[1]]
    plain, losses = plainly(LLAMA, 0.0, groups, sgd)
    model = LLAMA.build(0.0)
    with engine_for(model, sgd, config_of(2)) as engine:
        rows = loop(engine, groups[:2])
        engine.set_train_batch_size(8)
        assert (engine.gradient_accumulation_steps(), engine.get_batch_info()) == (4, (8, 2, 4))
        rows += loop(engine, groups[2:])
        assert engine.global_samples == 4 + 4 + 8
        engine.set_train_micro_batch_size(3)
        assert engine.get_batch_info() == (12, 3, 4)
        for wrong in (7, 0, -2):
            with pytest.raises(ConfigError, match="must be divisible"):
                engine.set_train_batch_size(wrong)
        with pytest.raises(ConfigError, match="greater than 0"):
            engine.set_train_micro_batch_size(0)
    assert rows == losses
    assert_same(model, plain, bitwise=True)


def test_the_engine_goes_on_with_what_the_program_assigns() -> None:
    model = Squares()
    with engine_for(model, sgd, config_of(1)) as engine:
        engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.5)
        engine.global_steps, engine.global_samples = 7, 14
        engine.train_batch(iter([(torch.ones(2, 1), torch.zeros(2, 1))]))
        assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (8, 16, 1)
        assert engine.get_lr() == [0.005]


def test_an_engine_is_on_its_device_already() -> None:
    with engine_for(Squares(), sgd, config_of(1)) as engine:
        assert engine.to(engine.device) is engine
        with pytest.raises(ModelError, match="float64"):
            engine.to(torch.float64)
        with pytest.raises(
            (AssertionError, RuntimeError), match=r"(?i)xpu"
        ):  # torch's own: no machine of the tests has one
            engine.to("xpu")


@pytest.mark.parametrize("scheduler", [{"scheduler": {"type": "ReduceLROnPlateau", "params": {}}}, {}])
def test_a_scheduler_that_cannot_be_stepped_is_an_error_before_an_update(scheduler: dict[str, Any]) -> None:
    model, data = Squares(), (torch.ones(2, 1), torch.zeros(2, 1))
    before, given = copy.deepcopy(model), None if scheduler else torch.optim.lr_scheduler.ReduceLROnPlateau
    with engine_for(model, sgd, config_of(1, **scheduler), lr_scheduler=given) as engine:
        with pytest.raises(UsageError, match=r"ReduceLROnPlateau: missing .*'metrics'\. Nothing was .*lr_kwargs=\{"):
            engine.train_batch([data])
        engine.backward(engine(*data))
        with pytest.raises(UsageError, match="missing"):
            engine.step(lr_kwargs={"metric": 1.0})
        assert_same(model, before, bitwise=True)
        engine.step(lr_kwargs={"metrics": 1.0})
        assert engine.global_steps == 1


def test_no_sync_changes_nothing_but_forbids_steps() -> None:
    plain, _ = plainly(LLAMA, 0.0, GROUPS[:1], sgd)
    model = LLAMA.build(0.0)
    with engine_for(model, sgd, config_of(4, zero_optimization={"stage": 3})) as engine:
        for position, batch in enumerate(GROUPS[0]):
            with engine.no_sync():
                engine.backward(engine(**batch).loss)
                assert engine.inside_no_sync_ctxt
                with pytest.raises(UsageError, match="illegal to call Engine"):
                    engine.step()
                with pytest.raises(UsageError, match="reentry"), engine.no_sync():
                    pass
            engine.set_gradient_accumulation_boundary(position == 3)
            engine.step()
        assert not engine.inside_no_sync_ctxt
    assert_same(model, plain, bitwise=True)


# ---- fp16 and backward of the user's own


def known_loss(outputs: Any) -> Any:
    outputs.loss.item()
    return outputs.loss


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
@pytest.mark.parametrize("loss_of", [lambda out: out.loss, known_loss, lambda out: out.logits.float().mean()])
def test_an_unscaled_backward_in_fp16_is_an_error_and_not_a_wrong_gradient(loss_of: Any) -> None:
    said = r"1\. engine.backward\(loss\) 2\. engine.scale\(loss\)"
    with engine_for(LLAMA.build(0.0), sgd, config_of(2, **FP16)) as engine, pytest.raises(UsageError, match=said):
        loss_of(engine(**GROUPS[0][0])).backward()


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_looking_at_losses_in_fp16_is_no_unscaled_backward() -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(4, **FP16)) as engine:
        loop(engine, GROUPS[:1], look=lambda i: i in (0, 2))
        for batch in GROUPS[1]:
            logits = engine(**batch).logits
            engine.backward(logits.float().pow(2).mean())
            engine.step()
        assert engine.global_steps == 2


# ---- masters, states and weights by hand


HALF_AND_RESIDENT = [
    {"bf16": {"enabled": False}},
    {"bf16": {"enabled": True}},
    {"bf16": {"enabled": True}, "harmony": {"pack_layers": 1, "residency": 2}},
]


@pytest.mark.parametrize("more", HALF_AND_RESIDENT, ids=["fp32", "bf16", "bf16, resident"])
def test_training_goes_on_with_values_set_by_hand(more: dict[str, Any]) -> None:
    one, other = LLAMA.build(0.0), LLAMA.build(0.0)
    with engine_for(one, adamw, config_of(4, **more)) as left, engine_for(other, adamw, config_of(4, **more)) as right:
        train_groups(left, GROUPS[:1])
        train_groups(right, GROUPS)  # elsewhere, then brought to where the first one is
        for (name, source), target in zip(one.named_parameters(), other.parameters(), strict=True):
            master = harmony_ds.utils.safe_get_full_fp32_param(source)
            assert master is not None and master.dtype == torch.float32, name
            harmony_ds.utils.safe_set_full_fp32_param(target, master)
            for key in ("exp_avg", "exp_avg_sq"):
                state = harmony_ds.utils.safe_get_local_optimizer_state(source, key)
                assert state is not None and state.shape == (source.numel(),)
                harmony_ds.utils.safe_set_local_optimizer_state(target, state, key)
        for state in right.optimizer.state.values():  # type: ignore[union-attr]
            state["step"] -= 1
        assert_same(other, one, bitwise=True)
        assert train_groups(right, GROUPS[1:]) == train_groups(left, GROUPS[1:])
    assert_same(other, one, bitwise=True)


@pytest.mark.parametrize("more", HALF_AND_RESIDENT, ids=["fp32", "bf16", "bf16, resident"])
@pytest.mark.parametrize("way", ["gathered", "loaded", "engine", "module_state_dict"])
def test_weights_changed_by_hand_reach_masters_and_the_device(way: str, more: dict[str, Any]) -> None:
    model = LLAMA.build(0.0)
    weight = model.model.layers[2].mlp.up_proj.weight
    with engine_for(model, sgd, config_of(4, **more)) as engine:
        before = train_groups(engine, GROUPS[:1])
        changed = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        if way == "gathered":
            with harmony_ds.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        elif way == "loaded":
            model.load_state_dict(changed)
        elif way == "engine":
            engine.load_state_dict({f"module.{name}": value for name, value in changed.items()})
        else:
            engine.load_module_state_dict({"module": changed})
        master = harmony_ds.utils.safe_get_full_fp32_param(weight)
        assert master is not None and not master.any()
        flat = torch.tensor(96.0).log().item()
        assert train_groups(engine, GROUPS[:1])[0] == pytest.approx(flat, rel=1e-2) != pytest.approx(before[0])


# ---- data


def test_training_data_is_handed_over_again_and_again() -> None:
    dataset = TensorDataset(torch.arange(5.0).view(5, 1), torch.ones(5, 1))
    model = Squares()
    engine, _, loader, _ = harmony_ds.initialize(
        model=model, optimizer=sgd(model.parameters()), training_data=dataset, config=config_of(2)
    )
    try:
        assert len(loader) == 3
        for _ in range(4):
            assert engine.train_batch().isfinite()
        assert engine.micro_steps == 8
        assert engine.global_steps == 4
        engine.set_dataiterator(iter([(torch.ones(2, 1), torch.ones(2, 1))]))
        engine.train_batch()
        with pytest.raises(StopIteration):
            engine.train_batch()
        engine.set_dataloader([])
        with pytest.raises(BatchError, match="loader is empty"):
            engine.train_batch()
        engine.set_dataloader(None)
        with pytest.raises(BatchError, match="need an iterator"):
            engine.train_batch()
    finally:
        engine.destroy()


# ---- what is said


def test_progress_times_and_memory_are_logged_as_asked(caplog: pytest.LogCaptureFixture) -> None:
    more = {"steps_per_print": 2, "wall_clock_breakdown": True, "memory_breakdown": True}
    with (
        caplog.at_level(logging.INFO),
        engine_for(LLAMA.build(0.0), sgd, config_of(2, None, {"pack_layers": 1}, **more)) as engine,
    ):
        tasks: list[harmony_ds.Task] = []
        engine.on_progress(lambda done, total, task: tasks.append(task))
        train_groups(engine, [group[:2] for group in GROUPS for _ in range(2)])
        times = engine.get_wall_clock_timers()
        recorded_ms = engine.plan_report().measured_step_ms
    lines = [record.getMessage() for record in caplog.records if record.name == "harmony_ds.progress"]
    steps = [line for line in lines if line.startswith("step=")]
    assert steps == ["step=2, skipped=0, lr=[0.01], mom=[0]", "step=4, skipped=0, lr=[0.01], mom=[0]"]
    assert lines[-2] == f"time (ms) | step: {recorded_ms[-1]:.2f}"
    assert len([line for line in lines if line.startswith("time (ms) | step: ")]) == 4
    assert len([line for line in lines if line.startswith("device peak")]) == 4
    assert any("RunningAvgSamplesPerSec=" in line for line in lines)
    assert tasks
    assert times == {"step": recorded_ms[-1]}


def test_nothing_is_logged_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), engine_for(LLAMA.build(0.0), sgd, config_of(2)) as engine:
        train_groups(engine, [GROUPS[0][:2]])
        assert engine.get_wall_clock_timers() == {}
    assert not [record for record in caplog.records if record.name == "harmony_ds.progress"]


def status_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "harmony_ds.status"]


@pytest.mark.fixed_times
def test_what_is_measured_planned_and_done_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(2, None, {"pack_layers": 1, "device_memory_gib": 0.5})
    with engine_for(LLAMA.build(0.0), sgd, config) as engine:
        train_groups(engine, [group[:2] for group in GROUPS for _ in range(2)])
        engine(**GROUPS[0][0], use_cache=False)  # is measured anew
        plan, first_step = engine.plan_report(), engine.memory_report()
    lines = status_lines(caplog)
    assert lines[:2] == ["measuring 6 layers with one micro-batch", "searching for a plan for 6 layer calls"]
    assert re.fullmatch(
        rf"6 packs, {first_step.planned_peak_bytes / 2**10:.1f} KiB of 512.0 MiB device memory, "
        rf"{plan.predicted_step_ms:.1f} ms a step predicted \(2 micro-batches\); measured 6 layer calls in "
        r"[\d.]+ m?s, searched in [\d.]+ m?s",
        lines[2],
    )
    assert re.match(r"first step done in [\d.]+ m?s, [\d.]+ x the prediction \(it checks the model", lines[3])
    assert len(lines) == 4


@pytest.mark.parametrize("quiet", [{"harmony": {"device": "cpu", "progress": False}}, {"log_level": "warning"}])
def test_the_engine_is_quiet_if_asked(quiet: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with engine_for(LLAMA.build(0.0), sgd, {**config_of(2), **quiet}) as engine:
        train_groups(engine, [GROUPS[0][:2]])
    assert status_lines(caplog) == []


def test_a_first_step_that_is_not_as_planned_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(4)) as engine:
        train_groups(engine, [GROUPS[0][:2]])
    assert "; not as planned: it had 2 micro-batches, and the plan is for 4)" in status_lines(caplog)[-1]


def test_settings_are_dumped_as_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), engine_for(Squares(), sgd, config_of(2, dump_state=True)):
        assert "  gradient_accumulation_steps = 2" in caplog.text


def test_monitors_get_losses_and_times_under_deepspeeds_tags(tmp_path: Path) -> None:
    csv_monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    asked = config_of(4, csv_monitor=csv_monitor, wall_clock_breakdown=True)
    with engine_for(LLAMA.build(0.0), sgd, asked) as engine:
        losses = train_groups(engine, GROUPS)
        evaluated = engine.eval_batch(iter(GROUPS[0])).item()

    written = {path.stem: path.read_text().split()[1:] for path in (tmp_path / "job").glob("*.csv")}
    rows = {name: [(int(a), float(b)) for a, b in (row.split(",") for row in own)] for name, own in written.items()}
    assert rows.pop("Train_Samples_eval_loss") == [(16, pytest.approx(evaluated))]
    assert rows["Train_Samples_train_loss"] == [(8, pytest.approx(losses[0])), (16, pytest.approx(losses[1]))]
    assert all(ms > 0.0 for _, ms in rows["Train_Samples_elapsed_time_ms_step"])
    assert all([samples for samples, _ in own] == [8, 16] for own in rows.values())


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "comet"])
def test_a_monitor_whose_package_is_missing_is_an_error_that_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = {"comet": "comet_ml"}.get(name, name)
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    said = f'"{name}" of the ds_config cannot be written: .*pip install {package}'
    with (
        pytest.raises(harmony_ds.ConfigError, match=said),
        engine_for(Squares(), sgd, config_of(1, **{name: {"enabled": True}})),
    ):
        pass


# ---- one process


def test_one_process_needs_no_launcher_no_environment_and_no_mpi() -> None:
    code = """
import os
for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
    os.environ.pop(name, None)
import harmony_ds
harmony_ds.init_distributed()
harmony_ds.init_distributed()
import torch
from deepspeed import comm
total = torch.ones(2)
torch.distributed.all_reduce(total)
print(comm.get_rank(), comm.get_world_size(), total.tolist())
try:
    harmony_ds.init_distributed(world_size=2)
except harmony_ds.UnsupportedError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "0 1 [1.0, 1.0]" in run.stdout
    assert "2 processes were asked for" in run.stdout


def test_settings_for_several_processes_are_refused() -> None:
    for arguments in ({"mpu": object()}, {"mesh_param": (2, 1)}):
        with pytest.raises(UnsupportedError, match="data parallelism alone"):
            harmony_ds.initialize(model=Squares(), config=config_of(1), **arguments)  # type: ignore[arg-type]


def test_a_failing_initialize_leaves_no_thread_and_a_usable_model() -> None:
    before = threading.active_count()
    model = LLAMA.build(0.0)
    for name in ("Cosine", "Counter", "LRScheduler"):  # torch's module holds collections.Counter, too
        scheduler = {"scheduler": {"type": name, "params": {}}}
        with pytest.raises(ConfigError, match=rf"LR scheduler {name}\. Did you mean (?!Counter|_?LRScheduler)\w"):
            harmony_ds.initialize(model=model, optimizer=sgd(model.parameters()), config=config_of(1, **scheduler))
    assert threading.active_count() == before
    assert torch.isfinite(model(**GROUPS[0][0]).loss)


def test_throughput_counts_the_samples_that_a_short_group_has(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    with engine_for(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), sgd, config_of(4)) as engine:
        timer = engine.tput_timer
        monkeypatch.setattr(timer, "stop", lambda global_step: told.append(timer.batch_size))
        batches = iter([(torch.ones(2, 2),)] * 6)
        for _ in range(2):
            engine.train_batch(batches, loss_fn=torch.mean)

    assert told == [8, 4]
