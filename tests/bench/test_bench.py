"""The bench: all engines get the same task, nothing measured is lost, and different losses are noticed."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harmony_ds.bench import engines
from harmony_ds.bench.ablation import AS_IT_IS, ablated, differing
from harmony_ds.bench.child import ChildFailedError, Server, copied_bytes, merged
from harmony_ds.bench.figure import draw, readable
from harmony_ds.bench.report import report
from harmony_ds.bench.results import Results, Rounds, Row
from harmony_ds.bench.run import choose_micro_batch, run
from harmony_ds.bench.summary import summarize
from harmony_ds.bench.workload import Workload
from harmony_ds.errors import BatchError, ConfigError
from tests.cli.shell import run as shell

pytestmark = pytest.mark.fixed_times

ROOT = Path(__file__).parents[2]
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


@pytest.fixture
def bench(model: str, tmp_path: Path) -> Callable[..., tuple[str, Results]]:
    """Runs `harmony-ds bench` over the model on the CPU, with these options, and keys of the ds_config beside its own."""

    def run_it(*options: str, **more: Any) -> tuple[str, Results]:
        config, output = tmp_path / "ds.json", tmp_path / "bench.json"
        config.write_text(json.dumps({**DS_CONFIG, **more}), encoding="utf-8")
        few = ("--ds-config", str(config), "--device", "cpu", "--rounds", "1", "--steps", "1", "--output", str(output))
        done = shell("bench", model, *few, *options)
        assert done.exit_code == 0, done.output
        return done.stdout, Results.load(output)

    return run_it


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


def test_processes_get_the_task_without_the_model_whose_memory_they_would_share(task: Workload) -> None:
    weights = dict(task.subject.model.named_parameters())
    sent = pickle.loads(pickle.dumps(task))
    assert sent == task and "subject" not in vars(sent)
    for name, parameter in sent.subject.model.named_parameters():
        assert torch.equal(parameter, weights[name]) and parameter.data_ptr() != weights[name].data_ptr()


def test_dropout_is_off(task: Workload) -> None:
    assert all(
        module.attention_dropout == 0.0
        for module in task.subject.model.modules()
        if hasattr(module, "attention_dropout")
    )


# ---- engines


def test_an_optimizer_that_an_engine_does_not_know_is_its_reason(model: str) -> None:
    config = {**DS_CONFIG, "optimizer": {"type": "Lion", "params": {}}}
    lion = Workload(model, config, rows=2, micro_batch=2, accumulation=4)
    assert "Adam or AdamW, and the ds_config's is Lion" in str(engines.adapter("torch").refusal(lion))


def test_an_engine_of_another_module_is_found_by_its_path() -> None:
    assert engines.adapter("harmony_ds.bench.engines.torch:torch") is engines.adapter("torch")
    with pytest.raises(ConfigError, match='"no_module:engine" cannot be imported'):
        engines.adapter("no_module:engine")
    with pytest.raises(ConfigError, match='Did you mean "torch"'):
        engines.adapter("harmony_ds.bench.engines.torch:torhc")


def test_a_round_of_harmony_ds_does_not_copy_what_stays_on_the_device(task: Workload) -> None:
    config = {**DS_CONFIG, "harmony": {"residency": 1, "pack_layers": 1}}
    engine = engines.adapter("harmony").build(replace(task, ds_config=config, memory_gib=0.01))
    copied = []
    for step in range(3):
        engine.step(task.batches(step))
        engine.drain()
        copied.append(engine.report()["traffic"]["host_to_device"].get("resident", 0))
    assert copied[0] > 0 == copied[2], copied


def test_deepspeeds_copies_are_those_of_the_formulas() -> None:
    command = [sys.executable, "-m", "benchmarks.zero3_traffic.run", "--accumulation", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("counted") == 4  # two stages in two dtypes


def test_copies_are_summed_by_direction() -> None:
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 10}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 3}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 99}},
        {"cat": "kernel", "name": "Memcpy HtoD", "args": {"bytes": 99}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 5}},
    ]
    assert copied_bytes(events) == {"host_to_device": 15, "device_to_host": 3}


# ---- results


def results_of(**rows: Row) -> Results:
    return Results(Rounds(steps=1, warmup_steps=1), {"cpu": "one", "gpu": None}, rows, "tokens", 16, 1000)


def row(task: Workload, engine: str, ms: list[float], losses: list[float]) -> Row:
    rounds = {str(i): {"drained_ms": value} for i, value in enumerate(ms)}
    return Row(engine, task, rounds=rounds, losses=losses)


def test_ratios_are_taken_round_by_round_and_losses_against_plain_torch(task: Workload) -> None:
    results = results_of(
        harmony=row(task, "harmony", [100.0, 300.0, 100.0], [2.0, 1.0]),
        torch=row(task, "torch", [100.0, 200.0, 50.0], [2.0, 1.0]),
        other=row(task, "deepspeed-zero2-offload", [200.0, 200.0, 200.0], [2.0, 1.1]),
    )
    harmony, torch_, other = summarize(results)
    assert torch_.ratio is not None and torch_.ratio.median == 1.5
    assert torch_.loss_difference is None and harmony.loss_difference == 0.0
    assert not other.losses_agree and other.loss_difference == pytest.approx(0.1)
    assert harmony.losses_agree and torch_.losses_agree
    assert other.items_per_s == pytest.approx(640)


def test_out_of_memory_is_a_result(task: Workload) -> None:
    failed = Row("torch", task, error="OutOfMemoryError: CUDA out of memory.", out_of_memory=True)
    results = results_of(harmony=row(task, "harmony", [1.0], [1.0]), torch=failed)
    assert summarize(results)[1].status == "out of memory: OutOfMemoryError: CUDA out of memory."
    assert "torch: out of memory: OutOfMemoryError: CUDA out of memory." in report(results)


def test_the_report_is_markdown_with_a_verdict(task: Workload) -> None:
    zero3 = "deepspeed-zero3-offload"
    results = results_of(
        harmony=row(task, "harmony", [100.0, 90.0, 80.0], [2.0, 1.0]),
        torch=row(task, "torch", [95.0, 90.0, 85.0], [2.0, 1.0]),
        **{f"{zero3} | 128 tokens": row(task.cut(8), zero3, [200.0] * 3, [2.0, 1.0])},
    )
    results.rows["torch-checkpoint"] = Row("torch-checkpoint", task, error="E: " + "x " * 90)
    results.rows[f"{zero3} | 128 tokens"].sweep = {"4": {"step_ms": 210.0}, "8": {"step_ms": 200.0}}
    text = report(results, Path("b/figure.png"))
    plain = " ".join(text.split())
    tables = [line for line in text.splitlines() if line.startswith("|")]

    assert max(len(line) for line in text.splitlines() if not line.startswith(("|", "!"))) <= 80
    assert "4 micro-batches of 2 rows, 128 tokens a step; computed in fp32, gradients summed in fp32" in plain
    assert "device memory capped at 0.001 GiB, kept by harmony alone" in plain
    assert "128 tokens a step: harmony is fastest, 90.0 ms." in plain
    assert "1.00 of torch's time (0.94 to 1.05: no clear winner)" in plain
    assert "0.45 of deepspeed-zero3-offload's time (0.40 to 0.50)" in plain
    assert len(tables) == 2 * (2 + 3) and len({line.count("|") for line in tables[:5]}) == 1
    assert [cell.strip() for cell in tables[4].split("|")[1:4]] == [f"{zero3} / 128 tokens", "1 x 8 (best)", "200.0"]
    assert "micro-batches tried: 4 rows: 210 ms, 8 rows: 200 ms." in plain
    assert text.endswith("![throughput, memory and bytes of a step](figure.png)")


def test_there_is_no_verdict_on_one_contestant(task: Workload) -> None:
    failed = Row("torch", task, error="OutOfMemoryError: CUDA out of memory.", out_of_memory=True)
    text = report(results_of(harmony=row(task, "harmony", [1.0], [1.0]), torch=failed))
    assert "fastest" not in text
    assert "torch: out of memory" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12,346"), (99.96, "100.0"), (12.34, "12.3"), (1.234, "1.23"), (0.0004, "0.0004"), (0.0, "0.00")],
)
def test_numbers_in_the_figure_can_be_read(value: float, text: str) -> None:
    assert readable(value) == text
    assert readable(math.nan) == ""


def test_a_figure_is_drawn_of_one_size_of_step_and_of_several(task: Workload, tmp_path: Path) -> None:
    from PIL import Image

    one = {name: row(task, name, [1.0], [1.0]) for name in ("harmony", "torch")}
    sizes = [replace(task, accumulation=count) for count in (2, 4)]
    several = {
        f"{name} | {cut.samples}": row(cut, name, [1.0], [1.0]) for cut in sizes for name in ("harmony", "torch")
    }
    for number, rows in enumerate((one, several)):
        file = tmp_path / f"{number}.png"
        assert draw(results_of(**rows), file)
        with Image.open(file) as image:
            assert len(image.convert("RGB").getcolors(2**24)) > 10
    assert not draw(results_of(torch=Row("torch", task, error="E")), tmp_path / "none.png")


def test_results_are_saved_whole_and_read_back(task: Workload, tmp_path: Path) -> None:
    results = results_of(harmony=row(task, "harmony", [1.5], [math.pi]))
    results.save(tmp_path / "deep" / "r.json")
    assert Results.load(tmp_path / "deep" / "r.json") == results
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]


def test_a_foreign_file_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"x\.json holds no results of harmony-ds bench"):
        Results.load(tmp_path / "x.json")


def test_resuming_another_comparison_is_refused(task: Workload, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results_of(harmony=Row("harmony", task)).save(path)
    with pytest.raises(ConfigError, match="steps was 1 and is 2"):
        Results.empty({"harmony": Row("harmony", task)}, Rounds(steps=2, warmup_steps=1)).resumed(path)


# ---- real runs


def test_a_comparison_is_resumed_and_its_losses_agree(bench: Any, tmp_path: Path) -> None:
    options = ("--device-memory-gib", "0.001", "--engines", "harmony,torch", "--no-sweep", "--warmup-steps", "1")
    _, begun = bench(*options, "--rounds", "2", "--limit-s", "1")
    assert not begun.finished
    first = {label: dict(row.rounds) for label, row in begun.rows.items()}
    _, finished = bench(*options, "--rounds", "2", "--resume", "--json")
    assert finished.finished
    for label, measured in first.items():
        assert measured.items() <= finished.rows[label].rounds.items()
        assert set(finished.rows[label].rounds) == {"0", "1"}
    harmony, plain = summarize(finished)
    assert harmony.loss_difference is not None and harmony.loss_difference < 1e-6
    assert harmony.moved["to device"] and harmony.memory["device"]
    assert "![" in (tmp_path / "bench.md").read_text() and (tmp_path / "bench.png").is_file()
    assert plain.row.engine == "torch"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engines", "harmny"], 'there is no engine "harmny". Did you mean "harmony"'),
        (["--engines", "torch", "--processes", "2"], "none of these engines can run here"),
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
    results = Results.empty({"harmony": Row("harmony", replace(task, memory_gib=1e-6))}, Rounds(1, 1, 1))
    run(results, tmp_path / "r.json", silent)
    assert results.finished and results.rows["harmony"].out_of_memory
    assert "out of memory" in summarize(results)[0].status


class Here:
    """An engine in this process: importing torch in one of its own takes longer than the steps."""

    def __init__(self, engine: str, task: Workload) -> None:
        server = Server(engine, task)
        self.ask = lambda method, *arguments: getattr(server, method)(*arguments)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


def test_the_best_micro_batch_is_searched_by_doubling(task: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harmony_ds.bench.run.Child", Here)
    one = Row("torch", task.cut(4))
    choose_micro_batch("torch | 128 tokens", one, silent)
    assert set(one.sweep) == {"4", "8"} and all(tried["step_ms"] > 0 for tried in one.sweep.values())
    assert one.task.micro_batch == int(min(one.sweep, key=lambda rows: one.sweep[rows]["step_ms"]))


def test_an_error_comes_whole_out_of_its_process() -> None:
    sent = pickle.loads(pickle.dumps(ChildFailedError("too large", out_of_memory=True)))

    assert (str(sent), sent.out_of_memory) == ("too large", True)


class Scripted(Here):
    """Steps that take the milliseconds of the script, by micro-batch; without one they are out of memory."""

    script: dict[int, float]

    def __init__(self, engine: str, task: Workload) -> None:
        self.rows = task.micro_batch

    def ask(self, *_: Any) -> dict[str, float]:
        if self.rows not in self.script:
            raise ChildFailedError("too large", out_of_memory=True)
        return {"drained_ms": self.script[self.rows]}


@pytest.mark.parametrize(
    ("device", "script", "tried", "best"),
    [
        ("cpu", {1: 9.0, 2: 5.0, 4: 5.2, 8: 3.0}, "1 2 4 8", 8),  # hardly slower is no end
        ("cpu", {1: 9.0, 2: 5.0, 4: 7.0, 8: 3.0}, "1 2 4", 2),
        ("cpu", {1: 9.0, 2: 5.0}, "1 2 4", 2),
        ("cpu", {}, "1", 1),
        ("cuda", {1: 9.0, 2: 5.0, 4: 3.0}, "8 4 2", 4),
        ("cuda", {}, "8 4 2 1", 1),
    ],
)
def test_the_search_ends_where_steps_are_slower_or_memory_ends(
    task: Workload, monkeypatch: pytest.MonkeyPatch, device: str, script: dict[int, float], tried: str, best: int
) -> None:
    monkeypatch.setattr("harmony_ds.bench.run.Child", Scripted)
    monkeypatch.setattr(Scripted, "script", script, raising=False)
    one = Row("deepspeed-zero3-offload", replace(task.cut(1), device=device))
    choose_micro_batch("x", one, silent)
    assert [*one.sweep] == tried.split() and one.task.micro_batch == best


def test_other_engines_run_at_their_best_micro_batch_and_resume_with_it(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def choose(label: str, row: Row, *_: Any) -> None:
        asked.append(label)
        row.task, row.sweep = row.task.cut(8), {"8": {"step_ms": 1.0}}

    monkeypatch.setattr("harmony_ds.cli.bench.choose_micro_batch", choose)
    bench("--engines", "harmony,torch", "--warmup-steps", "1", "--limit-s", "1")
    _, results = bench("--engines", "harmony,torch", "--warmup-steps", "1", "--resume")
    assert asked == ["torch"]
    ours, theirs = results.rows.values()
    assert (ours.task.micro_batch, theirs.task.micro_batch) == (2, 8)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert "1 x 8 (best)" in (tmp_path / "bench.md").read_text()


# ---- ablation


def test_the_ablation_compares_harmony_with_itself(task: Workload) -> None:
    rows = ablated(task)
    assert next(iter(rows)) == AS_IT_IS
    assert "without grouping" in rows
    assert "without pinned memory" not in rows  # nothing is page-locked on the CPU
    for one in rows.values():
        one.losses = [1.0, 0.5]
    rows["without prefetch"].losses[1] += 1e-9
    assert differing(results_of(**rows)) == ["without prefetch"]


# ---- several devices


def test_devices_take_the_micro_batches_of_a_step_in_turn(task: Workload) -> None:
    two = replace(task, devices=2, accumulation=2)
    assert two.samples == task.samples and two.sample_items == task.sample_items == 16
    every = task.batches(3)
    for rank in (0, 1):
        own = two.batches(3, rank)
        assert [batch["input_ids"].tolist() for batch in own] == [b["input_ids"].tolist() for b in every[rank::2]]
    assert two.cut(4).accumulation == 1
    with pytest.raises(BatchError, match="4 samples cannot be cut"):
        two.cut(8)


def test_engines_of_one_device_are_left_out_of_a_comparison_of_several(task: Workload) -> None:
    two = replace(task, devices=2)
    assert "2 are asked for" in str(engines.adapter("torch").refusal(two))
    assert engines.adapter("torch").refusal(task) is None
    for name in ("harmony", "deepspeed-zero3-offload", "deepspeed-zero2-offload"):
        assert engines.adapter(name).refusal(two) is None


@pytest.mark.parametrize("place", ["device", "host"])
def test_two_processes_are_compared_as_one_engine(bench: Any, place: str) -> None:
    two = ("--processes", "2", "--no-sweep", "--engines", "harmony,deepspeed-zero3-offload")
    said, results = bench(*two, harmony={"reduce": place})
    assert "4 micro-batches of 2 rows on each of 2 devices" in " ".join(said.split())
    ours, theirs = results.rows.values()
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    half = 4 * results.parameters / 2  # of the gradients, once
    assert ours.report["sent_bytes"] == (pytest.approx(half, rel=0.2) if place == "device" else 0)
    # Theirs cross for each of 4 micro-batches (weights of this size it does not gather).
    assert theirs.report["sent_bytes"] > 4 * half * 0.8


def test_a_pipeline_is_compared_with_one_device(bench: Any) -> None:
    _, results = bench("--devices", "2", "--engines", "harmony", harmony={"pack_layers": 1})
    rows = results.rows
    assert [*rows] == ["harmony", "harmony, one device"]
    assert rows["harmony"].losses == rows["harmony, one device"].losses
    assert rows["harmony"].report["between_devices"] > 0 == rows["harmony, one device"].report["between_devices"]


def test_an_error_in_one_of_two_processes_is_the_row_s(task: Workload, tmp_path: Path) -> None:
    broken = replace(task, devices=2, ds_config={**DS_CONFIG, "optimizer": {"type": "Nonsense", "params": {}}})
    results = Results.empty({"harmony": Row("harmony", broken)}, Rounds(1, 1, 1))
    run(results, tmp_path / "b.json", silent)
    assert "Nonsense" in str(results.rows["harmony"].error)


def test_answers_of_several_processes_are_one() -> None:
    first = {"losses": [1.0, 2.0], "drained_ms": 3.0, "host_peak_bytes": 5, "settings": {"a": 1}}
    other = {"losses": [2.0, 4.0], "drained_ms": 4.0, "host_peak_bytes": 6, "settings": {"a": 1}}
    assert merged([first]) == first
    assert merged([first, other]) == {
        "losses": [1.5, 3.0], "drained_ms": 4.0, "host_peak_bytes": 11, "settings": {"a": 1},
    }  # fmt: skip
