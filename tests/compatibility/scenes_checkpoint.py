"""Rows about checkpoints: what is returned, what lies where, what is restored."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.compatibility.engines import Api, config, net, train
from tests.compatibility.record import Script, about


def checkpoints(api: Api, script: Script, folder: Path) -> None:
    """Save, go on, go back, and go on again; tags; missing things; weights alone."""
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}}
    settings = config(1, scheduler=schedule)
    with api.engine(settings) as engine:
        train(engine, 2)
        state = {"epoch": 3, "note": "half-way"}
        script.row("save_checkpoint: returns", lambda: engine.save_checkpoint(str(folder), client_state=state))
        script.row("save_checkpoint: the default tag", lambda: sorted(p.name for p in folder.iterdir() if p.is_dir()))
        script.row("save_checkpoint: content of latest", (folder / "latest").read_text)
        script.row("save_checkpoint: another tag", lambda: engine.save_checkpoint(str(folder), tag="best"))
        script.row("save_checkpoint: latest is the other tag", (folder / "latest").read_text)
        script.row(
            "save_checkpoint: save_latest=False", lambda: engine.save_checkpoint(str(folder), "side", save_latest=False)
        )
        script.row("save_checkpoint: latest is as it was", (folder / "latest").read_text)
        script.row("save_checkpoint: no folder", lambda: engine.save_checkpoint(""))
        rates = engine.get_lr()
        losses = about(train(engine, 2, first=2))
        first = f"global_step{2}"
        path, found = engine.load_checkpoint(str(folder), tag=first)
        script.row("load_checkpoint: the path ends with the tag", lambda: first in str(path))
        script.row("load_checkpoint: client state", lambda: {key: found[key] for key in state})
        script.row("load_checkpoint: global_steps", lambda: engine.global_steps)
        script.row("load_checkpoint: global_samples", lambda: engine.global_samples)
        script.row("load_checkpoint: skipped_steps", lambda: engine.skipped_steps)
        script.row("load_checkpoint: the learning rate", lambda: engine.get_lr() == rates)
        script.row(
            "load_checkpoint: the losses that follow are those from before",
            lambda: about(train(engine, 2, first=2)) == losses,
        )
        script.row("load_checkpoint: by latest", lambda: "best" in str(engine.load_checkpoint(str(folder))[0]))
        empty = folder / "empty"
        empty.mkdir()
        script.row("load_checkpoint: nothing there", lambda: list(engine.load_checkpoint(str(empty))))
        script.row("save_16bit_model: returns", lambda: engine.save_16bit_model(str(folder / "alone")))
        script.row("save_16bit_model: files", lambda: sorted(p.name for p in (folder / "alone").iterdir()))
        weights = torch.load(folder / "alone" / "pytorch_model.bin", weights_only=True)
        script.row("save_16bit_model: names", lambda: sorted(weights))
        script.row("save_16bit_model: plain load_state_dict takes it", lambda: str(net().load_state_dict(weights)))
    with api.engine(settings) as engine:
        engine.load_checkpoint(str(folder), tag="best", load_module_only=True)
        script.row("load_checkpoint: load_module_only leaves the steps", lambda: engine.global_steps)
        engine.load_checkpoint(str(folder), tag="best", load_optimizer_states=False, load_lr_scheduler_states=False)
        script.row("load_checkpoint: without optimizer and scheduler, global_steps", lambda: engine.global_steps)
