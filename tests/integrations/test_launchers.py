"""One process under each launcher: the same step as without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("launched.py")
ACCELERATE = """
--use_deepspeed --num_processes 1 --num_machines 1 --machine_rank 0 --dynamo_backend no --zero_stage 2
--gradient_accumulation_steps 1 --mixed_precision no --main_process_port 29713
""".split()
LAUNCHERS = {
    "none": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "--master_port", "29711"],
    "deepspeed": [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", "29712"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", *ACCELERATE],
}


def launched(*command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "PATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_step(launcher: str) -> None:
    given = [str(SCRIPT)] + (["--accelerate"] if launcher == "accelerate" else [])
    run = launched(*LAUNCHERS[launcher], *given)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "trained 0.35365 -0.01979 1" in run.stdout


TRAINER = """
from transformers import Trainer, TrainingArguments
from tests.integrations.scripts.pieces import COMMON, model, rows
trainer = Trainer(model=model(), args=TrainingArguments(output_dir="out", **COMMON), train_dataset=rows())
trainer.train()
trainer.save_model()
print("packs", len(trainer.harmony_engine.plan.packing.packs))
"""


def test_a_trainer_takes_the_ds_config_of_accelerates_launcher_and_saves_its_model(tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": "auto", "harmony": {"device": "cpu", "pack_layers": 1}}
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "ds_config.json").write_text(json.dumps(settings))
    launch = [*LAUNCHERS["accelerate"][:4], "--num_processes", "1", "--deepspeed_config_file", "ds_config.json"]
    run = launched(*launch, "--module", "harmony_ds", "train.py", folder=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "packs 5" in run.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


PIPELINE = """
import torch, harmony_ds
config = {"train_micro_batch_size_per_gpu": 1, "harmony": {"device": "cpu", "devices": 2}}
harmony_ds.initialize(model=torch.nn.Linear(3, 1), config=config)
"""


def test_deepspeeds_launcher_of_several_processes_is_refused_for_a_pipeline(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import argparse{PIPELINE}")
    command = [*LAUNCHERS["deepspeed"][:4], "2", "--master_port", "29714"]
    run = launched(*command, str(script))
    assert run.returncode != 0
    assert "start the script by `python train.py`, or by `torchrun --nproc_per_node P`" in run.stderr
