"""One process under each launcher: the same step as without one."""

from __future__ import annotations

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


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_step(launcher: str) -> None:
    given = [str(SCRIPT)] + (["--accelerate"] if launcher == "accelerate" else [])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "PATH": path}
    run = subprocess.run(
        [*LAUNCHERS[launcher], *given], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )

    assert run.returncode == 0, run.stderr[-3000:]
    assert "trained 0.35365 -0.01979 1" in run.stdout
