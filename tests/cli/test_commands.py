"""The commands, as a shell sees them."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import harmony_ds
from harmony_ds import ConfigError
from harmony_ds.checkpoint import Layout
from harmony_ds.cli.answer import _rate
from harmony_ds.cli.command_line import COMMANDS, parse
from harmony_ds.cli.options import DEFAULT
from harmony_ds.estimate.quantized import Quantization
from harmony_ds.estimate.subject import load_subject
from harmony_ds.scheduler.profile import Profile
from tests.cli.shell import run

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return str(tmp_path)


def written(folder: Path, **ds_config: Any) -> str:
    """Write a ds_config; return its file."""
    folder.mkdir(exist_ok=True)
    file = folder / "ds_config.json"
    file.write_text(json.dumps(ds_config), encoding="utf-8")
    return str(file)


TORCH_ADAM = {"type": "AdamW", "params": {"torch_adam": True}}
ON_CPU: dict[str, Any] = {
    **{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
    **{"optimizer": TORCH_ADAM, "harmony": {"device": "cpu"}},
}


@pytest.fixture
def on_cpu(tmp_path: Path) -> str:
    return written(tmp_path, **ON_CPU)


def run_json(*arguments: str) -> dict[str, Any]:
    found = run(*arguments, "--json")
    data: dict[str, Any] = json.loads(found.stdout)
    return data


# ---- all of them


def test_no_garbage_is_looked_for_while_a_command_is_imported_and_when_its_process_ends() -> None:
    seen = """if 1:
        import atexit, gc, sys
        from harmony_ds.cli import main
        imported = lambda: "torch" not in sys.modules or hasattr(sys.modules.get("harmony_ds.cli.machines"), "command")
        gc.set_threshold(10)
        gc.callbacks.append(lambda *_: imported() or print("collected"))
        atexit.register(lambda: print(gc.get_freeze_count() > 0, gc.isenabled()) or gc.callbacks.clear())
        sys.argv = ["harmony-ds", "machines"]
        main()"""
    ended = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert "rtx4090" in ended.stdout and "collected" not in ended.stdout
    assert ended.stdout.splitlines()[-1] == "True True"


def test_estimate_keeps_its_garbage_meanwhile(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = []

    def load(*_: object) -> None:
        enabled.append(gc.isenabled())
        raise ConfigError("that is all")

    monkeypatch.setattr("harmony_ds.cli.estimate.load_subject", load)
    assert run("estimate", tiny, "--machine", "h100", "--no-advice").exit_code == 1
    assert enabled == [False] and gc.isenabled()


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=str)
def test_help_fits_a_terminal(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = run(*command, "--help")
    assert found.exit_code == 0
    assert found.stdout.startswith("usage: harmony-ds")
    assert max(map(len, found.stdout.splitlines())) <= 80


@pytest.mark.parametrize("module", ["harmony_ds", "harmony_ds.cli"])
def test_help_is_answered_without_torch(module: str) -> None:
    asked = [sys.executable, "-X", "importtime", "-m", module, "--help"]
    ended = subprocess.run(asked, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "harmony-ds" in ended.stdout
    assert "harmony_ds" in imported
    assert not imported & {"torch", "pydantic", "numpy"}


def test_choices_of_the_command_line_are_all_that_there_are() -> None:
    for how in Quantization:
        assert parse(["estimate", "model", "--lora", "1", "--base", how.value]).base == how.value
    for layout in Layout:
        assert parse(["convert", "a", "b", "--to", layout.value]).to == layout


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout.startswith(f"harmony_ds {harmony_ds.__version__} (torch {torch.__version__}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nope",), "COMMAND"),
        (("estimate",), "estimate"),
        (("estimate", "x", "--micro-batch", "0"), "--micro-batch"),
        (("estimate", "x", "--host-memory-gib", "nan"), "--host-memory-gib: nan is no number up to 1,073,741,824"),
        (("estimate", "x", "--host-memory-gib", "1e300"), "--host-memory-gib: 1e300 is no number up to"),
        (("estimate", "x", "--nvme-gb-per-s", "nan"), "--nvme-gb-per-s: nan is no number up to"),
        (("estimate", "x", "--devices", "1000000"), "--devices: 1000000 is no number up to 256"),
        (("plan", "x", "--processes", "257"), "--processes: 257 is no number up to 256"),
        (("estimate", "x", "--acumulation", "3"), "unrecognized arguments: --acumulation 3"),
        (("bench", "x", "--accumulation", "4,x"), "argument --accumulation: x is no whole number"),
        (("estimate", "x", "--sequence", "1e9"), "argument --sequence: 1e9 is no whole number"),
        (("estimate", "x", "--host-memory-gib", "8GB"), "argument --host-memory-gib: 8GB is no number"),
        (("machines", "x"), "unrecognized arguments: x"),
        (("convert", "a", "b", "--to", "zero9"), "invalid choice: 'zero9'"),
        (("estimat", "x"), "invalid choice: 'estimat'"),
    ],
    ids=str,
)
def test_a_wrong_command_line_says_what_is_wrong(arguments: tuple[str, ...], said: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2
    assert said in found.stderr
    assert not found.stdout


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    command = f"{sys.executable} -m harmony_ds.cli machines | head -n 1"
    found = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=True)
    assert "GPU" in found.stdout
    assert not found.stderr


# ---- estimate


def test_estimate_prints_fit_speed_and_bottleneck(tiny: str) -> None:
    found = run("estimate", tiny, "--no-advice")

    assert found.exit_code == 0
    assert max(map(len, found.stdout.splitlines())) <= 80
    for word in (
        "LlamaForCausalLM",
        "rtx4090/pcie4/desktop-ddr5 (assumed: name yours with --machine",
        "\ndevice ",
        "\nhost ",
        "tokens/s",
        "bottleneck",
    ):
        assert word in found.stdout


def test_the_advice_that_costs_a_key_stands_before_other_hardware(tiny: str) -> None:
    said = run("estimate", tiny, "--sequence", "16").stdout
    assert 0 < said.index("several micro-batches joined") < said.index("what would help most")


def test_estimate_says_where_plain_pytorch_does_the_same(tiny: str) -> None:
    found = run("estimate", tiny)

    assert "none: this fits the device whole" in found.stdout
    assert "+0.0%" not in found.stdout


def test_estimate_as_json(tiny: str) -> None:
    data = run_json("estimate", tiny, "--micro-batch", "2", "--accumulation", "4", "--sequence", "32")
    assert data["fits"] is True
    assert data["tokens_per_step"] == 2 * 4 * 32
    assert data["tokens_per_s"] == pytest.approx(data["tokens_per_step"] / data["step_ms"] * 1e3)
    assert data["device_peak_bytes"] <= data["device_budget_bytes"]
    assert set(data["changes"]) >= {"a link twice as fast", "twice the device memory"}


def test_adapters_are_trained_and_the_model_is_not(tiny: str) -> None:
    arguments = ("estimate", tiny, "--sequence", "32", "--no-advice")
    whole, adapted, wider = (run_json(*arguments, *more) for more in ((), ("--lora", "2"), ("--lora", "4")))

    linear = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)  # inputs and outputs of a layer's seven linear layers
    assert adapted["trainable_parameters"] == 4 * 2 * linear
    assert adapted["parameters"] == whole["parameters"] + 4 * 2 * linear
    assert wider["trainable_parameters"] == 2 * adapted["trainable_parameters"]
    assert adapted["host_bytes"]["optimizer"] == 8 * adapted["trainable_parameters"]


def test_a_base_can_be_quantized_where_adapters_are_trained(tiny: str) -> None:
    arguments = ("estimate", tiny, "--sequence", "32", "--no-advice", "--lora", "2", "--base")
    plain, whole, packed = (run_json(*arguments, base) for base in ("bf16", "int8", "nf4"))

    assert plain["host_bytes"]["weights"] > whole["host_bytes"]["weights"] > packed["host_bytes"]["weights"]
    assert plain["parameters"] == whole["parameters"] == packed["parameters"]
    found = run("estimate", tiny, "--base", "nf4")
    assert found.exit_code == 1
    assert "--base nf4 freezes the model's layers: say what is trained beside them (--lora 16)" in found.stderr


def test_what_does_not_fit_beside_adapters_may_be_quantized(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 24}), encoding="utf-8")
    arguments = (
        "estimate",
        str(tmp_path),
        "--sequence",
        "32",
        "--no-advice",
        "--lora",
        "2",
        "--host-memory-gib",
        "0.001",
    )
    plain, packed = run(*arguments), run(*arguments, "--base", "nf4")
    assert plain.exit_code == packed.exit_code == 3
    assert "(1) --base nf4 (frozen weights in 4 bits)" in plain.stdout
    assert "--base nf4" not in packed.stdout


def test_adapters_need_linear_layers_and_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("estimate", "tests.cli.test_commands:table_alone", "--lora", "2")
    assert found.exit_code == 1
    assert "Embedding has no linear layers (torch.nn.Linear)" in found.stderr

    found = run("estimate", "tests.cli.test_commands:net", "--lora", "1000000")
    assert found.exit_code == 1
    assert re.search(r"--lora 1000000 is more than the rank .* which is \d+ at most", found.stderr)

    monkeypatch.setitem(sys.modules, "peft", None)
    found = run("estimate", "tests.cli.test_commands:net", "--lora", "2")
    assert found.exit_code == 1
    assert "pip install peft" in found.stderr


def table_alone() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Embedding(4, 2), {"input": torch.zeros(1, 2, dtype=torch.long)}


def test_estimate_of_several_devices(tiny: str) -> None:
    arguments = ("estimate", tiny, "--accumulation", "4", "--sequence", "32", "--no-advice", "--processes", "2")
    data = run_json(*arguments)

    assert data["devices"] == data["policy"]["devices"] == 2
    assert data["tokens_per_step"] == 2 * 4 * 32
    assert data["swaps"]["sent"] > 0
    assert data["machine"].startswith("2 x rtx4090")
    one = run_json("estimate", tiny, "--accumulation", "4", "--sequence", "32", "--no-advice")
    assert "sent" in one["swaps"] and one["swaps"]["sent"] == 0
    shown = run(*arguments).stdout
    assert "in each of 2 processes: 256 tokens" in shown
    assert "to other devices" in shown


def test_a_pipeline_is_estimated_planned_and_drawn(tiny: str, tmp_path: Path) -> None:
    asked = (tiny, "--accumulation", "4", "--sequence", "32", "--devices", "2")
    data = run_json("estimate", *asked, "--no-advice")
    assert data["devices"] == data["policy"]["pipeline"] == 2 and data["processes"] == 1
    assert data["tokens_per_step"] == 4 * 32
    harmony = {"device": "cpu", "pack_layers": 1}
    file = written(tmp_path, train_micro_batch_size_per_gpu=1, optimizer=TORCH_ADAM, harmony=harmony)
    shown = run("plan", *asked, "--ds-config", file)
    assert shown.exit_code == 0 and "through a pipeline of 2 devices: 128 tokens" in shown.stdout
    assert "from device to device" in shown.stdout and "compute 1" in shown.stdout
    assert ", without a bound: fits" in shown.stdout
    drawn = tmp_path / "trace.json"
    assert run("trace", *asked, "--ds-config", file, "--output", str(drawn), "--run").exit_code == 0
    events = json.loads(drawn.read_text())["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    busy = {(e["pid"], tracks[e["pid"], e["tid"]]) for e in events if e["ph"] == "X"}
    assert {
        (pid, f"{stream}{n}") for pid in (1, 2) for stream in ("compute", "peer", "swap_in") for n in ("", " 1")
    } <= busy


def test_a_batch_that_processes_do_not_divide_is_an_error(tiny: str, tmp_path: Path) -> None:
    file = written(tmp_path, train_batch_size=8, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=4)
    assert run_json("estimate", tiny, "--ds-config", file, "--processes", "2", "--no-advice")["devices"] == 2
    found = run("estimate", tiny, "--ds-config", file, "--processes", "3")
    assert found.exit_code == 1
    assert "8 != 1 * 4 * 3" in found.stderr


def test_an_answer_says_what_is_trained_and_how_and_what_is_frozen(tiny: str) -> None:
    file = ("estimate", tiny, "--no-advice", "--sequence", "32")
    whole = run(*file).stdout
    assert "all trained in bfloat16 by AdamW, gradients clipped at 1" in whole
    assert "of 1 row of 32 tokens in a step" in whole
    adapted = " ".join(run(*file, "--lora", "2", "--base", "nf4").stdout.split())
    data = run_json(*file, "--lora", "2", "--base", "nf4")
    assert f"{data['trainable_parameters']:,} trained in bfloat16 by AdamW" in adapted
    assert re.search(r"; [\d,]+ frozen and quantized \([\d.]+ [KM]iB\); [\d,]+ frozen in bfloat16", adapted)


def test_the_sequence_is_the_models_longest(tiny: str) -> None:
    assert run_json("estimate", tiny, "--no-advice")["tokens_per_step"] == 64 * 16


def test_a_model_too_large_for_the_device_exits_with_3_and_names_ways_out(tiny: str) -> None:
    # A budget that holds some sixteen thousand rows of 64 tokens, and not four times as many.
    budget = ("--micro-batch", "65536", "--accumulation", "2", "--device-memory-gib", "0.5")
    found = run("estimate", tiny, *budget)

    assert found.exit_code == 3
    assert "does not fit" in found.stdout and "too many" in found.stdout
    assert re.search(r"of\s512.0\sMiB,\s[\d.]+\sMiB\sare\sleft\sto\sCUDA's\slibraries", found.stdout)
    assert "--micro-batch" in found.stdout and "--device-memory-gib" in found.stdout


def test_a_model_too_large_for_the_host_exits_with_3_and_is_forecast_all_the_same(tmp_path: Path) -> None:
    wide = {**TINY, "hidden_size": 512, "intermediate_size": 1024}  # gradients take more than the buffer of their casts
    (tmp_path / "config.json").write_text(json.dumps(wide), encoding="utf-8")
    file = written(tmp_path, train_micro_batch_size_per_gpu=1, bf16={"enabled": True}, harmony={"pack_layers": 1})
    arguments = ("estimate", str(tmp_path), "--ds-config", file, "--host-memory-gib", "0.05", "--no-advice")
    data = run_json(*arguments)

    assert run(*arguments).exit_code == 3
    assert data["lack"]["what"] == "host memory"
    assert data["lack"]["needed_bytes"] == sum(data["host_bytes"].values())
    assert data["tokens_per_s"] > 0
    for processes in ("1", "2"):
        ways = " ".join(run_json(*arguments, "--processes", processes)["lack"]["ways_out"])
        for one in ("grad_accum_dtype", "gradient_clipping", "Lion", '"nvme"', "split_masters"):
            assert one in ways


def test_masters_and_state_on_a_disk_are_no_host_memory_and_its_rate_is_the_updates(tiny: str, tmp_path: Path) -> None:
    memory = run_json("estimate", tiny, "--no-advice")
    fast, slow = (run_json("estimate", tiny, "--no-advice", "--nvme-gb-per-s", rate) for rate in ("1000", "0.001"))

    assert memory["disk_bytes"] == 0
    assert fast["disk_bytes"] == slow["disk_bytes"] == 12 * memory["trainable_parameters"]
    assert fast["host_bytes"]["masters"] == fast["host_bytes"]["optimizer"] == 0
    assert slow["bottleneck"] == "update" and slow["step_ms"] > 24 * memory["trainable_parameters"] / 1e3
    assert fast["step_ms"] < slow["step_ms"] / 2
    offload = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    swapping = {"harmony": {"residency": "off", "pack_layers": 1}}
    file = written(tmp_path, **{**DEFAULT, "zero_optimization": offload, **swapping})
    weights = run_json("estimate", tiny, "--no-advice", "--ds-config", file, "--nvme-gb-per-s", "0.001")
    assert weights["disk_bytes"] == memory["host_bytes"]["weights"] and weights["bottleneck"] == "disk"
    assert weights["host_bytes"]["masters"] == memory["host_bytes"]["masters"]  # the ds_config's word stays
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    bf16 = {"train_batch_size": 1, "bf16": {"enabled": True}}
    found = run("estimate", tiny, "--ds-config", written(tmp_path, **bf16, zero_optimization=offload))
    assert found.exit_code == 1 and "--nvme-gb-per-s" in found.stderr


def test_a_stash_that_fits_the_device_is_a_way_out_of_too_little_host_memory(tiny: str, tmp_path: Path) -> None:
    for stash in ("host", "device"):
        file = written(tmp_path, train_micro_batch_size_per_gpu=1, harmony={"stash": stash, "pack_layers": 1})
        data = run_json("estimate", tiny, "--ds-config", file, "--host-memory-gib", "0.001", "--no-advice")
        assert (data["host_bytes"]["stash"] > 0) == (stash == "host")
        told = any(one.startswith('"harmony": {"stash": "device"}') for one in data["lack"]["ways_out"])
        assert told == (stash == "host")


def test_a_ds_config_with_split_masters_is_estimated(tiny: str, tmp_path: Path) -> None:
    whole, split = (
        run_json("estimate", tiny, "--no-advice", "--ds-config", file)
        for file in (
            written(tmp_path / name, train_micro_batch_size_per_gpu=1, bf16={"enabled": True}, harmony=harmony)
            for name, harmony in (("whole", {"residency": "kept"}), ("split", {"split_masters": True}))
        )
    )

    assert split["host_bytes"]["masters"] == whole["host_bytes"]["masters"] // 2
    assert split["policy"]["resident"] == []  # as in training: split masters are not updated on the device


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{tiny}", "--machine", "rtx409"), 'no GPU called "rtx409". Did you mean "rtx4090"'),
        (("{tiny}", "--machine", "h100/pcie9"), 'no link or host called "pcie9"'),
        (("no_such_model",), 'no model "no_such_model"'),
        (("meta-llama/Llama-2-7b-hf",), "hf download meta-llama/Llama-2-7b-hf config.json --local-dir Llama-2-7b-hf"),
        (("no_such_module:model",), "cannot be imported"),
        (("tests.cli.test_commands:nothing",), "must return a module"),
        (("json:loads",), "must be a function without arguments: missing a required argument: 's'"),
        (("json:__name__",), "is no function but str"),
        (("{tiny}", "--devices", "2", "--accumulation", "257"), "is not estimated"),
        (("tests.cli.test_commands:module_alone",), "returned a module alone"),
        (("{tiny}", "--ds-config", "none.json"), "no ds_config none.json"),
    ],
)
def test_wrong_input_is_one_sentence_and_exits_with_1(tiny: str, arguments: tuple[str, ...], message: str) -> None:
    found = run("estimate", *(argument.format(tiny=tiny) for argument in arguments))
    assert found.exit_code == 1
    *progress, error = found.stderr.strip().splitlines()
    assert message in error
    assert all(line.endswith(" ...") for line in progress)
    assert not found.stdout


def test_a_mistyped_path_is_not_taken_for_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert run("estimate", "models/none").stderr.endswith("(or its directory), or module:function.\n")
    assert "hf download model/none" in run("estimate", "model/none").stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"model_type": "llama",}',
            "is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 24",
        ),
        ('{"model_type": "llamma"}', 'describes a "llamma", which is no model_type that transformers'),
        ("[]", "describes no model that transformers knows"),
    ],
)
def test_a_config_that_describes_no_model_says_where_it_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    found = run("estimate", str(tmp_path))
    assert found.exit_code == 1
    assert message in found.stderr
    assert len(found.stderr) < 500


def test_rows_longer_than_a_table_of_positions_are_an_error(tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}), encoding="utf-8")

    found = run("estimate", str(tmp_path), "--sequence", "65")

    assert found.exit_code == 1
    assert "--sequence 65 is longer than the 64 positions of the model's transformer.wpe" in found.stderr


def test_rows_longer_than_positions_that_are_computed_are_estimated(
    tiny: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = run_json("estimate", tiny, "--sequence", "65", "--no-advice")
    assert data["tokens_per_step"] == 16 * 65
    assert "rows of 65 tokens are longer than the 64 positions" in caplog.text


def test_a_config_unknown_to_transformers_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}', encoding="utf-8")
    found = run("estimate", str(tmp_path))
    assert found.exit_code == 1
    assert 'describes a "nobody", which is no model_type that transformers' in found.stderr


def test_a_config_of_diffusers_names_no_inputs(tmp_path: Path) -> None:
    described = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.42.1", "num_layers": 19}
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    found = run("estimate", str(tmp_path))
    assert found.exit_code == 1
    assert "describes a FluxTransformer2DModel of diffusers, and not which inputs" in found.stderr
    assert "examples/flux_lora/size.py" in found.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": "256"}, "'hidden_size' expected int, got str (value: '256')"),
        ({"hidden_size": 256, "num_attention_heads": 7}, "not a multiple of the number of attention heads (7)"),
    ],
)
def test_a_config_that_transformers_refuses_is_one_sentence(
    tmp_path: Path, values: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **values}), encoding="utf-8")
    found = run("estimate", str(tmp_path))
    assert found.exit_code == 1
    assert message in found.stderr.strip().splitlines()[-1]


def nothing() -> int:
    return 1


def module_alone() -> nn.Module:
    return nn.Linear(2, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = torch.relu(block(inputs))
        return F.mse_loss(inputs, torch.zeros_like(inputs))


def net() -> tuple[nn.Module, dict[str, Tensor]]:
    return Net(), {"inputs": torch.ones(8, 32)}


def test_a_function_may_make_the_model_and_its_inputs() -> None:
    data = run_json("estimate", "tests.cli.test_commands:net", "--no-advice")
    assert data["model"] == "Net"
    assert data["samples_per_step"] == 8 * 16


@pytest.mark.parametrize(("items_per_s", "said"), [(0.2074, "0.21"), (9.96, "10"), (1646.6, "1,647"), (10.4, "10")])
def test_rates_of_less_than_one_a_second_are_no_zero(items_per_s: float, said: str) -> None:
    assert _rate(items_per_s) == said


def test_the_ds_config_is_read_as_the_engine_reads_it(tiny: str, on_cpu: str) -> None:
    data = run_json("estimate", tiny, "--ds-config", on_cpu, "--no-advice")
    assert (data["micro_batch"], data["accumulation"]) == (2, 2)
    assert data["host_bytes"]["masters"] == 0  # fp32


# ---- profile and plan


@pytest.mark.real_rates
def test_a_profile_is_saved_and_planned_with(tiny: str, on_cpu: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    saved = run("profile", tiny, "--ds-config", on_cpu, "--output", str(file))

    assert saved.exit_code == 0
    assert len(Profile.from_json(file.read_text(encoding="utf-8")).calls) == 7
    data = run_json("plan", tiny, "--ds-config", on_cpu, "--profile", str(file))
    assert data["fits"] is True
    assert data["machine"].startswith("cpu on")
    assert data["tokens_per_s"] > 0


def test_a_file_that_cannot_be_written_is_found_before_the_work(tiny: str, on_cpu: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    found = run("profile", tiny, "--ds-config", on_cpu, "--output", str(tmp_path / "file" / "profile.json"))
    assert found.exit_code == 2
    assert f"{tmp_path / 'file'} cannot be made" in found.stderr
    assert "measuring" not in found.stderr
    found = run("profile", tiny, "--ds-config", on_cpu, "--output", str(tmp_path))
    assert found.exit_code == 2
    assert "is a folder: name a file" in found.stderr


def test_the_folder_of_an_output_is_made(tiny: str, on_cpu: str, tmp_path: Path) -> None:
    file = tmp_path / "missing" / "profile.json"
    assert run("profile", tiny, "--ds-config", on_cpu, "--output", str(file)).exit_code == 0
    assert file.is_file()


def test_where_not_even_a_row_in_a_million_fits_the_answer_names_how_many_do(tiny: str) -> None:
    found = run("estimate", tiny, "--micro-batch", "1000000000", "--sequence", "16", "--no-advice")
    assert found.exit_code == 3
    assert re.search(r"\(1\) a micro-batch of \d+ rows", found.stdout + found.stderr)


@pytest.mark.parametrize(("text", "message"), [(None, "No such file"), ("{}", "no profile of harmony_ds")])
def test_a_file_without_a_profile_is_an_error(tiny: str, tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "profile.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    found = run("plan", tiny, "--profile", str(file))
    assert found.exit_code == 1
    assert message in found.stderr


# ---- machines


def test_machines_are_listed_with_their_sources() -> None:
    found = run("machines")
    assert found.exit_code == 0
    assert max(map(len, found.stdout.splitlines())) <= 80
    for word in ("rtx4090", "pcie4", "desktop-ddr5"):
        assert word in found.stdout
    assert "rtx4090" in run_json("machines")["gpus"]


# ---- trace


def events_of(file: Path, phase: str, pid: int) -> list[Any]:
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event["ph"] == phase and event["pid"] == pid]


def test_trace_draws_the_predicted_step(tiny: str, on_cpu: str, tmp_path: Path) -> None:
    profile, file = tmp_path / "profile.json", tmp_path / "trace.json"
    run("profile", tiny, "--ds-config", on_cpu, "--output", str(profile))
    arguments = ("trace", tiny, "--ds-config", on_cpu, "--profile", str(profile), "--output", str(file))
    found, data = run(*arguments), run_json(*arguments)

    assert (found.exit_code, found.stderr) == (0, f"planning {tiny} ...\n")
    for word in ("compute", "the whole step", str(file)):
        assert word in found.stdout
    assert "executed" not in found.stdout
    assert data["executed"] is None
    assert data["simulated"]["step_ms"] > 0
    layers = {event["args"]["layers"] for event in events_of(file, "X", 1)}
    assert any(names.startswith("model.embed_tokens") for names in layers)
    assert not events_of(file, "X", 2)


def test_trace_draws_the_executed_step_beside_the_predicted(tiny: str, on_cpu: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    data = run_json("trace", tiny, "--ds-config", on_cpu, "--run", "--steps", "2", "--output", str(file))
    assert data["executed"]["step_ms"] >= data["executed"]["busy_ms"]["compute"] > 0
    names = [{e["name"] for e in events_of(file, "X", pid) if e["args"]["micro_batch"] >= 0} for pid in (1, 2)]
    assert names[0] == names[1] != set()


def test_trace_takes_the_saved_plan_of_the_ds_config(tiny: str, on_cpu: str, tmp_path: Path) -> None:
    profile, saved, file = tmp_path / "profile.json", tmp_path / "plan.json", tmp_path / "trace.json"
    run("profile", tiny, "--ds-config", on_cpu, "--output", str(profile))
    subject = load_subject(tiny, "cpu", 2)
    config = {**ON_CPU, "harmony": {"device": "cpu", "pack_layers": 2}}
    engine, *_ = harmony_ds.initialize(model=subject.model, config=config)
    engine.train_batch(iter([subject.inputs] * 2))
    assert engine.plan is not None
    saved.write_text(engine.plan.to_json(), encoding="utf-8")
    engine.destroy()
    with_plan = written(tmp_path, **{**ON_CPU, "harmony": {"device": "cpu", "plan": str(saved)}})
    for more in (("--profile", str(profile)), ("--run", "--steps", "1")):
        data = run_json("trace", tiny, "--ds-config", with_plan, "--output", str(file), *more)

        assert data["plan"] == "as saved"
        assert {e["args"]["pack"] for e in events_of(file, "X", 1)} == {0, 1, 2, 3}


def test_trace_of_a_model_that_does_not_fit_exits_with_3(tiny: str, on_cpu: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    for more in ((), ("--run",)):
        arguments = ("--ds-config", on_cpu, "--device-memory-gib", "0.001", "--micro-batch", "16", *more)
        found = run("trace", tiny, "--output", str(file), *arguments)

        assert found.exit_code == 3
        assert "does not fit" in found.stderr
        assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--run", "--profile", "profile.json"), "leave --profile away"), (("--profile", "profile.json"), "No such file")],
)
def test_trace_of_wrong_input(tiny: str, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    found = run("trace", tiny, "--output", str(tmp_path / "trace.json"), *arguments)
    assert found.exit_code == 1
    assert message in found.stderr
