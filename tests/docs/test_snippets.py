"""Every piece of Python on a page runs, with what the page takes for granted around it; the README's program as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harmony_ds
from tests.docs.pages import DOCUMENTS, Snippet, fenced
from tests.families import FAMILIES, Batch
from tests.integrations.as_deepspeed import deepspeed_as_it_was

Names = dict[str, Any]
README, *PAGES = DOCUMENTS
PYTHON = [snippet for page in PAGES for snippet in fenced(page, "python")]
SNIPPETS = [*fenced(README, "diff"), *PYTHON]
GPT2 = next(family for family in FAMILIES if family.name == "gpt2")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "harmony": {"device": "cpu"},
}


def batches_of(count: int) -> Iterator[Batch]:
    return iter([GPT2.batch(index) for index in range(count)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = self.layers(inputs)
        return made


# ---- what each snippet takes for granted, and what must be true afterwards


def a_deepspeed_script() -> Names:
    """Return a model, and the batches of two steps."""
    Path("ds_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return {"model": GPT2.build(0.0), "batches": [GPT2.batch(index) for index in range(4)]}


def in_training() -> Names:
    engine, *_ = harmony_ds.initialize(model=GPT2.build(0.0), config=CONFIG)
    engine.train_batch(batches_of(2))
    return {"engine": engine, "batches": batches_of(2)}


def a_seed() -> Names:
    return {"torch": torch, "harmony_ds": harmony_ds, "seed": 1, "step": 2, "index": 3}


def plain_loop() -> Names:
    model = Net()
    return {
        "harmony_ds": harmony_ds,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "config": CONFIG,
        "criterion": nn.MSELoss(),
        "batches": [(torch.ones(2, 4), torch.zeros(2, 2)) for _ in range(2 * 2)],
    }


def several_optimizers() -> Names:
    model = Net()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    names = {"harmony_ds": harmony_ds, "torch": torch, "model": model, "config": CONFIG}
    return {**names, "matrices": matrices, "others": others}


def a_trainer() -> Names:
    from transformers import Trainer, TrainingArguments

    rows = [{key: value[0] for key, value in GPT2.batch(0).items()} for _ in range(4)]
    Path("ds_config.json").write_text(json.dumps({"harmony": {"device": "cpu"}}), encoding="utf-8")
    return {"Trainer": Trainer, "TrainingArguments": TrainingArguments, "model": GPT2.build(0.0), "data": rows}


def a_trainer_of_deepspeed() -> Names:
    """Return the page's names before the change, with DeepSpeed replaced: its own engine needs a launcher."""
    names = a_trainer()
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "harmony": {"device": "cpu"},
    }
    Path("ds_config.json").write_text(json.dumps(config), encoding="utf-8")
    harmony_ds.install_as_deepspeed()
    return names


def beginning_of_loops() -> Names:
    names: Names = {}
    exec(next(snippet.text for snippet in PYTHON if snippet.page.name == "loops.md"), names)
    return names


def triplets() -> Names:
    engine, *_ = harmony_ds.initialize(model=Net(), config=CONFIG)
    return {"engine": engine, "F": torch.nn.functional, "batches": list(torch.randn(4, 3, 2, 4))}


def with_an_adapter() -> Names:
    names = in_training()
    names["engine"].module.disable_adapter = nullcontext
    return {**names, "torch": torch, "divergence": torch.nn.functional.mse_loss}


def trl() -> Names:
    found = pytest.importorskip("trl")
    return {"SFTTrainer": found.SFTTrainer, "GRPOTrainer": found.GRPOTrainer}


def saved_model() -> Names:
    from transformers import AutoModelForCausalLM

    GPT2.build(0.0).save_pretrained("saved")
    return {"AutoModelForCausalLM": AutoModelForCausalLM, "harmony_ds": harmony_ds, "path": "saved", "config": CONFIG}


def saved_weights() -> Names:
    import safetensors.torch

    safetensors.torch.save_file(Net().state_dict(), "model.safetensors")
    return {"torch": torch, "safetensors": safetensors, "harmony_ds": harmony_ds, "Net": Net, "config": CONFIG}


def to_record() -> Names:
    return {**in_training(), "json": json, "Path": Path}


def trained(steps: int) -> Callable[[Names], None]:
    def check(names: Names) -> None:
        assert names["engine"].global_steps == steps

    return check


def begun(names: Names) -> None:
    assert len(names["loader"]) == 8 * names["config"]["gradient_accumulation_steps"]


def trained_by_trainer(names: Names) -> None:
    assert names["trainer"].harmony_engine.swap_report().ratio == 1.0


def trained_by_accelerate(names: Names) -> None:
    assert names["model"].global_steps == 8
    assert names["model"].swap_report().ratio == 1.0


def stepped_together(names: Names) -> None:
    engine = names["engine"]
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    assert len(engine.optimizer.param_groups) == 2
    assert engine.global_steps == 1
    engine.destroy()


def seeded(names: Names) -> None:
    assert torch.initial_seed() == harmony_ds.micro_batch_seed(1, 2, 3)


def saved(names: Names) -> None:
    assert names["client_state"] == {"epoch": 3}
    assert Path(names["folder"]).is_dir()
    assert Path("out/pytorch_model.bin").is_file()
    assert Path("out/config.json").is_file()


def trains(names: Names) -> None:
    names["trainer"].train()


def installed(names: Names) -> None:
    import deepspeed

    assert deepspeed.initialize is harmony_ds.initialize


def mixed(names: Names) -> None:
    assert issubclass(names["SFT"], harmony_ds.integrations.transformers.HarmonyMixin)


def loaded(names: Names) -> None:
    assert not any(parameter.is_meta for parameter in names["model"].parameters())
    assert names["engine"].global_steps == 0


def drawn(names: Names) -> None:
    assert json.loads(Path("trace.json").read_text(encoding="utf-8"))["traceEvents"]


AROUND: list[tuple[str, Callable[[], Names], Callable[[Names], None]]] = [
    ("README.md", a_deepspeed_script, trained(2)),
    ("README.md", a_trainer, trains),
    ("docs/checkpoints.md", in_training, saved),
    ("docs/huggingface.md", a_trainer_of_deepspeed, trains),
    ("docs/huggingface.md", a_trainer, trains),
    ("docs/huggingface.md", trl, mixed),
    ("docs/huggingface.md", dict, installed),
    ("docs/loops.md", dict, begun),
    ("docs/loops.md", beginning_of_loops, trained(8)),
    ("docs/loops.md", beginning_of_loops, trained(8)),
    ("docs/loops.md", beginning_of_loops, trained_by_trainer),
    ("docs/loops.md", beginning_of_loops, trained_by_accelerate),
    ("docs/loops.md", plain_loop, trained(4)),
    ("docs/loops.md", triplets, trained(2)),
    ("docs/loops.md", with_an_adapter, trained(2)),
    ("docs/loops.md", several_optimizers, stepped_together),
    ("docs/loops.md", a_seed, seeded),
    ("docs/memory.md", saved_model, loaded),
    ("docs/memory.md", saved_weights, loaded),
    ("docs/planning.md", to_record, drawn),
]


def test_every_snippet_has_its_surroundings() -> None:
    assert [str(snippet).split(":")[0] for snippet in SNIPPETS] == [page for page, _, _ in AROUND]


@pytest.mark.parametrize("number", range(len(SNIPPETS)), ids=[str(snippet) for snippet in SNIPPETS])
def test_a_snippet_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippet: Snippet = SNIPPETS[number]
    _, prelude, check = AROUND[number]
    with deepspeed_as_it_was():
        names = prelude()
        try:
            exec(compile(new_side(snippet.text), str(snippet), "exec"), names)
            check(names)
        finally:
            if "engine" in names:
                names["engine"].destroy()


def new_side(text: str) -> str:
    """Return a diff's lines after the change; a text that is no diff is returned as it is."""
    if not re.search("^[-+]", text, re.MULTILINE):
        return text
    return "\n".join(line[1:] for line in text.splitlines() if not line.startswith("-"))


@pytest.mark.real_rates
def test_the_program_of_the_readme_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = fenced(README, "python")
    names: Names = {}
    torch.manual_seed(0)
    exec(compile(program.text, str(program), "exec"), names)
    names["engine"].destroy()

    said = capsys.readouterr().out
    losses = [float(line.split()[1]) for line in said.splitlines()[:20]]
    assert losses[-1] < losses[0] / 2
    assert "1.0000 x the lower bound" in said
