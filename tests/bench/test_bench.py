"""The bench: what is compared is the same task; nothing measured is lost; who computes something else is seen."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harmony_ds.bench import engines
from harmony_ds.bench.ablation import AS_IT_IS, ablated, equal_results
from harmony_ds.bench.child import Server, copied_bytes, merged
from harmony_ds.bench.engines.deepspeed import ZEROS
from harmony_ds.bench.page import write_page
from harmony_ds.bench.peak import gpu_named
from harmony_ds.bench.results import Contestant, Results, Row
from harmony_ds.bench.run import Rounds, begin, best_micro_batch, run
from harmony_ds.bench.summary import losses_agree, summarize
from harmony_ds.bench.table import report
from harmony_ds.bench.workload import Workload, model_flops
from harmony_ds.errors import BatchError, ConfigError
from harmony_ds.profiler.hardware import known_hardware
from tests.cli.shell import run as shell

DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 61,
    "max_position_embeddings": 16, "use_cache": False, "attention_dropout": 0.5,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(path)


@pytest.fixture
def task(model: str) -> Workload:
    return Workload(model, DS_CONFIG, rows=2, micro_batch=2, accumulation=4, memory_gib=0.001)


def silent(_: str) -> None:
    return None


# ---- the task


def test_every_cut_sees_the_same_samples(task: Workload) -> None:
    for step in (0, 3):
        whole = torch.cat([batch["input_ids"] for batch in task.batches(step)])
        assert whole.shape == (8, 16)
        for rows in (1, 4, 8):
            parts = task.cut(rows).batches(step)
            assert len(parts) == 8 // rows
            assert torch.equal(torch.cat([batch["input_ids"] for batch in parts]), whole)
    assert not torch.equal(task.batches(0)[0]["input_ids"], task.batches(1)[0]["input_ids"])
    assert torch.equal(task.batches(0)[1]["input_ids"], task.batches(0)[1]["labels"])


def test_a_cut_that_does_not_divide_the_step_is_refused(task: Workload) -> None:
    with pytest.raises(BatchError, match="8 samples cannot be cut into micro-batches of 3"):
        task.cut(3)


def test_dropout_is_off(task: Workload) -> None:
    assert all(
        module.attention_dropout == 0.0
        for module in task.subject.model.modules()
        if hasattr(module, "attention_dropout")
    )


def test_model_flops_are_three_forward_passes(task: Workload) -> None:
    rows, hidden, inner, vocabulary, length = 8, 16, 24, 61, 16
    products = 3 * (4 * hidden**2 + 3 * hidden * inner) + hidden * vocabulary
    attention = 3 * length * hidden  # scores and values of each token with, on average, half of all
    forward = 2 * rows * length * (products + attention)
    assert model_flops(task) == 3 * forward


# ---- engines


@pytest.mark.parametrize("name", ["fsdp2-offload", "roundpipe", "deepspeed-super-offload", "deepspeed-zenflow"])
def test_what_needs_cuda_says_so(task: Workload, name: str) -> None:
    assert engines.adapter(name).unavailable(task) == "it needs a CUDA device"


def test_an_optimizer_that_an_engine_does_not_know_is_its_reason(model: str) -> None:
    config = {**DS_CONFIG, "optimizer": {"type": "Lion", "params": {}}}
    lion = Workload(model, config, rows=2, micro_batch=2, accumulation=4)
    assert "Adam or AdamW, and the ds_config's is Lion" in str(engines.adapter("torch").unavailable(lion))


@pytest.mark.parametrize("name", ["deepspeed-zero2-offload", "deepspeed-zero3-offload"])
def test_zero_traffic_formulas_for_one_micro_batch(task: Workload, name: str) -> None:
    count = sum(p.numel() for p in task.subject.model.parameters())
    moved = ZEROS[name].traffic(task.cut(8))
    weights = 1 if "zero2" in name else 2
    assert moved["host_to_device"]["weights"] == weights * 4 * count
    assert moved["device_to_host"]["gradients"] == (4 if "zero2" in name else 8) * count


def test_copies_are_summed_by_direction() -> None:
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 10}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 3}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 99}},
        {"cat": "kernel", "name": "Memcpy HtoD", "args": {"bytes": 99}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 5}},
    ]
    assert copied_bytes(events) == {"host_to_device": 15, "device_to_host": 3}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4"), ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("Tesla K80", None),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_the_name_that_cuda_gives_it(name: str, known: str | None) -> None:
    found = gpu_named(name, known_hardware().gpus.values())
    assert (None if found is None else found.name) == known


# ---- results


def results_of(task: Workload, **rows: Row) -> Results:
    results = Results({"steps": 1, "warmup_steps": 1, "contestants": {}}, {"cpu": "one", "gpu": None})
    results.peak_tflops = (1e-3, "a guess")
    for label, row in rows.items():
        results.rows[label] = row
        results.items_per_step[label] = 128
        results.flops_per_step[label] = 10**8
    return results


def row(task: Workload, engine: str, ms: list[float], losses: list[float]) -> Row:
    rounds = {str(i): {"ms": value, "drained_ms": value, "cpu_ms": value} for i, value in enumerate(ms)}
    return Row(engine, task.as_json(), rounds, losses)


def test_ratios_are_taken_round_by_round_and_losses_against_plain_torch(task: Workload) -> None:
    results = results_of(
        task,
        harmony=row(task, "harmony", [100.0, 300.0, 100.0], [2.0, 1.0]),
        torch=row(task, "torch", [100.0, 200.0, 50.0], [2.0, 1.0]),
        other=row(task, "deepspeed-zero2-offload", [200.0, 200.0, 200.0], [2.0, 1.1]),
    )
    harmony, torch_, other = summarize(results)
    assert torch_.ratio is not None and torch_.ratio.median == 1.5
    assert torch_.losses_agree is None and harmony.losses_agree is True
    assert other.losses_agree is False and other.loss_difference == pytest.approx(0.1)
    assert not losses_agree([harmony, torch_, other])
    assert other.items_per_s == pytest.approx(640)
    assert other.utilization == pytest.approx(0.5)


def test_out_of_memory_is_a_result(task: Workload, tmp_path: Path) -> None:
    failed = Row("torch", task.as_json(), error="OutOfMemoryError: CUDA out of memory.", out_of_memory=True)
    results = results_of(task, harmony=row(task, "harmony", [1.0], [1.0]), torch=failed)
    assert summarize(results)[1].status == "out of memory: OutOfMemoryError: CUDA out of memory."
    write_page(results, tmp_path / "page.html")
    assert "OutOfMemoryError" in (tmp_path / "page.html").read_text()


def test_the_report_says_who_won_by_what_and_fits_a_terminal(task: Workload) -> None:
    results = results_of(
        task,
        harmony=row(task, "harmony", [100.0, 90.0, 80.0], [2.0, 1.0]),
        torch=row(task, "torch", [95.0, 90.0, 85.0], [2.0, 1.0]),
        **{
            "deepspeed-zero3-offload, uncapped | 128 tokens": row(
                task, "deepspeed-zero3-offload", [200.0] * 3, [2.0, 1.0]
            )
        },
    )
    results.rows["torch-checkpoint"] = Row("torch-checkpoint", task.as_json(), error="E: " + "x " * 90)
    results.items_per_step["torch-checkpoint"] = 128
    text = report(results, summarize(results))
    plain = " ".join(text.split())

    assert max(map(len, text.splitlines())) <= 80
    assert "4 micro-batches of 2 rows, 128 tokens a step; computed in fp32, gradients summed in fp32" in plain
    assert "device memory capped at 0.001 GiB, kept by harmony alone" in plain
    assert "128 tokens a step: harmony is fastest, 90.0 ms." in plain
    assert "1.00 of torch's time (0.94 to 1.05: no clear winner)" in plain
    assert "0.45 of deepspeed-zero3-offload, uncapped's time (0.40 to 0.50)" in plain


def test_a_curve_has_a_line_for_each_engine_and_its_best_micro_batch(task: Workload, tmp_path: Path) -> None:
    rows = {}
    for tokens in (64, 128):
        for name in ("harmony", "torch", "torch, its best micro-batch"):
            rows[f"{name} | {tokens} tokens"] = row(task, name.split(",")[0], [1.0], [1.0])
    results = results_of(task, **rows)
    results.items_per_step = {label: int(label.split()[-2]) for label in rows}
    write_page(results, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    throughput = page[page.index("<svg") : page.index("</svg>")]
    assert throughput.count('id="legend') == 1
    assert throughput.count("<!-- torch, its best micro-batch -->") == 1


def test_results_are_saved_whole_and_read_back(task: Workload, tmp_path: Path) -> None:
    results = results_of(task, harmony=row(task, "harmony", [1.5], [math.pi]))
    results.save(tmp_path / "deep" / "r.json")
    assert Results.load(tmp_path / "deep" / "r.json") == results
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]


def test_a_foreign_file_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"x\.json holds no results of harmony-ds bench"):
        Results.load(tmp_path / "x.json")


def test_resuming_another_comparison_is_refused(task: Workload, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    begin([Contestant("harmony", "harmony", task)], Rounds(), path, False).save(path)
    with pytest.raises(ConfigError, match="steps was 2 and is 7"):
        begin([Contestant("harmony", "harmony", task)], Rounds(steps=7), path, True)


# ---- real runs


def test_a_comparison_is_resumed_and_its_losses_agree(model: str, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(DS_CONFIG))
    output = tmp_path / "r.json"
    command = ["bench", model, "--ds-config", str(config), "--device", "cpu", "--device-memory-gib", "0.001",
               "--engines", "harmony,torch,fsdp2-offload", "--rounds", "2", "--steps", "1", "--warmup-steps", "1",
               "--output", str(output)]  # fmt: skip
    done = shell(*command, "--apart", "--limit-s", "1")
    assert done.exit_code == 0, done.output
    assert "fsdp2-offload is left out: it needs a CUDA device" in done.output
    begun = Results.load(output)
    assert not begun.finished
    first = {label: dict(row.rounds) for label, row in begun.rows.items()}
    done = shell(*command, "--resume", "--json")
    assert done.exit_code == 0, done.output
    finished = Results.load(output)
    assert finished.finished
    for label, measured in first.items():
        assert measured.items() <= finished.rows[label].rounds.items()
        assert set(finished.rows[label].rounds) == {"0", "1"}
    harmony, plain = summarize(finished)
    assert harmony.loss_difference is not None and harmony.loss_difference < 1e-6
    assert harmony.host_to_device and harmony.device_peak_bytes
    page = output.with_suffix(".html").read_text()
    assert page.count("<svg") >= 3
    assert "http" not in page.replace("http://www.w3.org", "")  # but for the names of SVG's namespaces
    assert plain.engine == "torch"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engines", "harmny"], 'there is no engine "harmny"; did you mean harmony'),
        (["--engines", "fsdp2-offload"], "none of these engines can run here"),
        (["--accumulation", "4,x"], '--accumulation is "4,x": give whole numbers'),
        (["--device", "tpu"], '--device is "cpu" or "cuda", not "tpu"'),
        pytest.param(
            ["--device", "cuda"],
            "sees no CUDA device here: use --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_wrong_options_are_one_sentence(model: str, options: list[str], message: str) -> None:
    done = shell("bench", model, *(["--device", "cpu"] if "--device" not in options else []), *options)
    assert done.exit_code == 1
    assert message in done.output and "Traceback" not in done.output


def test_an_engine_that_fails_is_a_row_and_the_others_go_on(task: Workload, tmp_path: Path) -> None:
    tight = Workload(**{**task.as_json(), "memory_gib": 1e-6})
    contestants = [Contestant("harmony", "harmony", tight)]
    results = run(contestants, Rounds(1, 1, 1), tmp_path / "r.json", False, silent)
    assert results.finished and results.rows["harmony"].out_of_memory
    assert "out of memory" in summarize(results)[0].status


class Here:
    """An engine in this process: importing torch in one of its own takes longer than the steps."""

    def __init__(self, engine: str, task: Workload, core: int | None) -> None:
        self._serve = lambda: Server(engine, task)

    def start(self) -> None:
        server = self._serve()
        self.ask = lambda method, *arguments: getattr(server, method)(*arguments)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


def test_the_best_micro_batch_is_looked_for_by_doubling(task: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harmony_ds.bench.run.Child", Here)
    best, found = best_micro_batch(Contestant("torch | 128 tokens", "torch", task.cut(4)), Rounds(), silent)
    assert set(found) == {"4", "8"} and all(one["step_ms"] > 0 for one in found.values())
    assert best is None or (best.task.micro_batch, best.label) == (8, "torch, its best micro-batch | 128 tokens")


# ---- ablation


def test_the_ablation_compares_harmony_with_itself(task: Workload) -> None:
    contestants = ablated(task)
    assert contestants[0].label == AS_IT_IS
    assert "without grouping" in {c.label for c in contestants}
    assert "without pinned-memory" not in {c.label for c in contestants}  # nothing is page-locked on the CPU
    rows = {c.label: row(c.task, "harmony", [1.0], [1.0, 0.5]) for c in contestants}
    rows["without prefetch"].losses[1] += 1e-9
    assert [label for label, equal in equal_results(results_of(task, **rows)).items() if not equal] == [
        "without prefetch"
    ]


# ---- several devices


def test_devices_take_the_micro_batches_of_a_step_in_turn(task: Workload) -> None:
    two = replace(task, devices=2, accumulation=2)
    assert two.samples == task.samples and two.items == task.items
    every = task.batches(3)
    for rank in (0, 1):
        own = two.batches(3, rank)
        assert [batch["input_ids"].tolist() for batch in own] == [b["input_ids"].tolist() for b in every[rank::2]]
    assert two.cut(4).accumulation == 1
    with pytest.raises(BatchError, match="4 samples cannot be cut"):
        two.cut(8)


def test_what_runs_on_one_device_is_left_out(task: Workload) -> None:
    two = replace(task, devices=2)
    assert "2 are asked for" in str(engines.adapter("torch").refusal(two))
    assert engines.adapter("torch").refusal(task) is None
    for name in ("harmony", "deepspeed-zero3-offload", "deepspeed-zero2-offload"):
        assert engines.adapter(name).refusal(two) is None


@pytest.mark.parametrize("place", ["device", "host"])
def test_two_processes_are_compared_as_one_engine(model: str, tmp_path: Path, place: str) -> None:
    file, output = tmp_path / "ds.json", tmp_path / "bench.json"
    file.write_text(json.dumps({**DS_CONFIG, "harmony": {"reduce": place}}), encoding="utf-8")
    arguments = (
        "bench",
        model,
        "--ds-config",
        str(file),
        "--device",
        "cpu",
        "--processes",
        "2",
        "--output",
        str(output),
    )
    found = shell(*arguments, "--engines", "harmony,deepspeed-zero3-offload", "--rounds", "1", "--steps", "1")

    assert found.exit_code == 0, found.stdout + found.stderr
    assert "4 micro-batches of 2 rows on each of 2 devices" in " ".join(found.stdout.split())
    ours, theirs = Results.load(output).rows.values()
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    parameters = Results.load(output).parameters
    half = 4 * parameters / 2  # of the gradients, once
    assert ours.report["sent_bytes"] == (pytest.approx(half, rel=0.2) if place == "device" else 0)
    # Theirs cross for each of 4 micro-batches (weights of this size it does not gather).
    assert theirs.report["sent_bytes"] > 4 * half * 0.8


def test_a_pipeline_is_compared_with_one_device(model: str, tmp_path: Path) -> None:
    file, output = tmp_path / "ds.json", tmp_path / "bench.json"
    file.write_text(json.dumps({**DS_CONFIG, "harmony": {"pack_layers": 1}}), encoding="utf-8")
    arguments = ("bench", model, "--ds-config", str(file), "--device", "cpu", "--devices", "2", "--output", str(output))
    found = shell(*arguments, "--engines", "harmony", "--rounds", "1", "--steps", "1")
    assert found.exit_code == 0, found.stdout + found.stderr
    rows = Results.load(output).rows
    assert [*rows] == ["harmony", "harmony, one device"]
    assert rows["harmony"].losses == rows["harmony, one device"].losses
    assert rows["harmony"].report["between_devices"] > 0 == rows["harmony, one device"].report["between_devices"]


def test_an_error_in_one_of_two_processes_is_the_row_s(task: Workload, tmp_path: Path) -> None:
    broken = replace(task, devices=2, ds_config={**DS_CONFIG, "optimizer": {"type": "Nonsense", "params": {}}})
    results = run([Contestant("harmony", "harmony", broken)], Rounds(1, 1, 1), tmp_path / "b.json", False, silent)
    assert "Nonsense" in str(results.rows["harmony"].error)


def test_answers_of_several_processes_are_one() -> None:
    first = {"losses": [1.0, 2.0], "ms": 3.0, "cpu_ms": 1.0, "host_peak_bytes": 5, "settings": {"a": 1}}
    other = {"losses": [2.0, 4.0], "ms": 4.0, "cpu_ms": 2.0, "host_peak_bytes": 6, "settings": {"a": 1}}
    assert merged([first]) == first
    assert merged([first, other]) == {
        "losses": [1.5, 3.0], "ms": 4.0, "cpu_ms": 3.0, "host_peak_bytes": 11, "settings": {"a": 1},
    }  # fmt: skip
