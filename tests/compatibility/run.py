"""Asks both engines every row, and writes their answers:

python -m tests.compatibility.run PAGE.md      both engines, each in a process of its own; a page for readers
python -m tests.compatibility.run ENGINE FILE  one engine; its outcomes as JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENGINES = ("deepspeed", "harmony_ds")


def ask(engine: str) -> dict[str, Any]:
    """Return every row's outcome under `engine`, in this process."""
    import torch

    from tests.compatibility import scenes_checkpoint, scenes_config, scenes_engine, scenes_more, scenes_names
    from tests.compatibility.engines import Api
    from tests.compatibility.record import Script

    torch.set_num_threads(1)
    api, script = Api(engine), Script(engine)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        scenes_config.read(api, script)
        scenes_config.forms(api, script, folder)
        scenes_engine.start(api, script)
        scenes_engine.training(api, script)
        scenes_engine.gradients(api, script)
        scenes_engine.schedules(api, script)
        scenes_engine.optimizers(api, script)
        scenes_more.half(api, script)
        scenes_more.scales(api, script)
        scenes_more.masters(api, script)
        scenes_more.direct(api, script)
        scenes_more.refused(api, script)
        scenes_more.progress(api, script)
        scenes_more.sizes_and_contexts(api, script)
        scenes_more.data(api, script)
        scenes_more.monitors(api, script, folder)
        scenes_more.profiles(api, script, folder)
        scenes_more.partitions(api, script)
        (folder / "checkpoints").mkdir()
        scenes_checkpoint.checkpoints(api, script, folder / "checkpoints")
        scenes_names.names(api, script)
        scenes_names.without_zero(api, script)
        scenes_names.partitioned(api, script)
        scenes_names.loaded(api, script, folder / "names")
    return script.rows


def ask_both(folder: Path) -> dict[str, dict[str, Any]]:
    """Return both engines' outcomes, each from a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    running = {
        engine: subprocess.Popen(
            [sys.executable, "-m", "tests.compatibility.run", engine, str(folder / f"{engine}.json")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for engine in ENGINES
    }
    for engine, process in running.items():
        said, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{engine} ended with {process.returncode}:\n{said[-4000:]}")
    return {engine: json.loads((folder / f"{engine}.json").read_text()) for engine in ENGINES}


def main() -> None:
    if len(sys.argv) == 3:
        with contextlib.redirect_stdout(sys.stderr):
            rows = ask(sys.argv[1])
        Path(sys.argv[2]).write_text(json.dumps(rows))
        return
    from tests.compatibility.report import document

    with tempfile.TemporaryDirectory() as folder:
        outcomes = ask_both(Path(folder))
    page = Path(sys.argv[1])
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(document(outcomes["deepspeed"], outcomes["harmony_ds"]), encoding="utf-8")


if __name__ == "__main__":
    main()
