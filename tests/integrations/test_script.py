"""Scripts that know nothing of harmony_ds, run by `python -m harmony_ds`."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from harmony_ds.__main__ import main
from harmony_ds.integrations.script import install_in_trainers, run_script
from harmony_ds.integrations.transformers import HarmonyMixin, HarmonyTrainer
from tests.integrations.as_deepspeed import deepspeed_as_it_was, forget_accelerate
from tests.integrations.scripts.pieces import model, rows
from tests.oracle import assert_same, train_plainly

pytestmark = pytest.mark.fixed_times

SCRIPTS = Path(__file__).with_name("scripts")
TRAINERS = {"trainer": "transformers", "sft": "trl", "dpo": "trl"}
"""Scripts with a Trainer, and the package that each needs."""


@pytest.fixture
def ds_config(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    settings = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    more = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True, "harmony": {"device": "cpu"}}
    path.write_text(json.dumps({**settings, **more}))
    return path


@pytest.fixture
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore what running a script changes in this process."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with deepspeed_as_it_was():
        yield


def run_stock(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the script without DeepSpeed; return its global names."""
    monkeypatch.setattr(sys, "argv", [name, "--output_dir", str(folder)])
    forget_accelerate()
    return runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")


def run_grouped(name: str, folder: Path, ds_config: Path) -> dict[str, Any]:
    """Run the script with DeepSpeed, by harmony_ds; return its global names."""
    forget_accelerate()
    return run_script([str(SCRIPTS / f"{name}.py"), "--output_dir", str(folder), "--deepspeed", str(ds_config)])


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_trains_as_if_the_mixin_stood_first(
    name: str, tmp_path: Path, ds_config: Path, as_it_was: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(TRAINERS[name])
    stock = run_stock(name, tmp_path / "stock", monkeypatch)
    ours = run_grouped(name, tmp_path / "ours", ds_config)

    trainer = ours["trainer"]
    assert isinstance(trainer, HarmonyMixin)
    assert type(trainer).__name__ == type(stock["trainer"]).__name__
    assert trainer.harmony_engine is not None
    assert trainer.harmony_engine.swap_report().ratio == 1.0
    assert_same(trainer.model, stock["trainer"].model, bitwise=True)
    logged, expected = trainer.state.log_history, stock["trainer"].state.log_history
    assert [entry.get("loss") for entry in logged] == [entry.get("loss") for entry in expected]
    assert [entry.get("grad_norm") for entry in logged] == [entry.get("grad_norm") for entry in expected]
    assert ours.get("evaluated") == stock.get("evaluated")


def test_a_loop_of_accelerate(
    tmp_path: Path, ds_config: Path, as_it_was: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = run_stock("accelerate_loop", tmp_path / "stock", monkeypatch)
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0}
    settings = json.loads(ds_config.read_text())
    del settings["zero_optimization"]  # which accelerate would ask for
    ds_config.write_text(json.dumps({**settings, **sizes}))
    ours = run_grouped("accelerate_loop", tmp_path / "ours", ds_config)
    assert ours["engine"].swap_report().ratio == 1.0
    assert_same(ours["trained"], stock["trained"], bitwise=True)


def test_a_loop_for_deepspeed(tmp_path: Path, ds_config: Path, as_it_was: None) -> None:
    expected = model()
    batches = [*DataLoader(rows().with_format("torch"), batch_size=2)]  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    train_plainly(expected, [batches[:4], batches[4:]], optimizer, clip=1.0, seed_of=lambda *_: 0)

    ours = run_grouped("deepspeed_loop", tmp_path, ds_config)
    assert ours["engine"].swap_report().ratio == 1.0
    assert_same(ours["trained"], expected, bitwise=True)


def test_a_trainer_that_has_the_mixin_keeps_its_class(tmp_path: Path, as_it_was: None) -> None:
    install_in_trainers()
    assert type(Trainer.__new__(HarmonyTrainer)) is HarmonyTrainer
    assert type(Trainer.__new__(Trainer)).__mro__[1:3] == (HarmonyMixin, Trainer)
    assert type(Trainer.__new__(Trainer)) is type(Trainer.__new__(Trainer))


def test_a_script_finds_its_own_arguments_and_neighbours(tmp_path: Path, as_it_was: None) -> None:
    (tmp_path / "neighbour_of_this_script.py").write_text("answer = 42")
    script = tmp_path / "train.py"
    script.write_text("import sys\nfrom neighbour_of_this_script import answer\ngiven = sys.argv\nname = __name__")
    ran = run_script([str(script), "--rate", "1"])
    assert (ran["given"], ran["answer"], ran["name"]) == ([str(script), "--rate", "1"], 42, "__main__")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "no script is named"),
        (["-m"], "no script is named"),
        (["--deepspeed", "ds.json", "train.py"], "no script is named"),
        (["no_such_script.py"], "there is no script no_such_script.py"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(command: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(command)


def test_the_command_runs_a_module_and_names_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "my_training.py").write_text(
        "import deepspeed, sys\nfrom transformers import TrainingArguments\n"
        "TrainingArguments(output_dir='out', use_cpu=True).device\n"
        "print(deepspeed.initialize.__module__, sys.argv[1:])"
    )
    command = [sys.executable, "-m", "harmony_ds"]
    ran = subprocess.run(
        [*command, "-m", "my_training", "-x"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert "harmony_ds.engine ['-x']" in ran.stdout, ran.stderr[-2000:]
    assert "In order to use Torch DDP" not in ran.stderr
    wrong = subprocess.run([*command, "nothing.py"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert wrong.returncode == 1
    assert wrong.stderr.splitlines()[-1].startswith(
        "error: there is no script nothing.py. Usage: python -m harmony_ds SCRIPT"
    )
