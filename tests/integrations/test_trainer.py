"""HarmonyTrainer against the stock Trainer, in fp32 on the CPU: the same weights, losses and norms, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import harmony_ds
from harmony_ds.errors import DoesNotFitError, UnsupportedError, UsageError
from harmony_ds.integrations.transformers import HarmonyMixin, HarmonyTrainer

pytestmark = pytest.mark.fixed_times

CONFIG: dict[str, Any] = {"harmony": {"device": "cpu"}}


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, use_cache=False
    )
    return LlamaForCausalLM(config)


def text(rows: int = 22) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    data = []
    for row in range(rows):
        ids = torch.randint(0, 61, (8,), generator=generator)
        labels = ids.clone()
        labels[: row % 5] = -100  # so that micro-batches hold different numbers of items
        data.append({"input_ids": ids, "labels": labels})
    return data


def arguments(folder: Path, cls: Any = TrainingArguments, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 4, "num_train_epochs": 2, "learning_rate": 1e-2, "max_grad_norm": 0.5,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "weight_decay": 0.01, "seed": 3,
    }  # fmt: skip
    return cls(**{**settings, **more})


def logged(trainer: Any) -> list[tuple[float, float, float]]:
    return [(e["loss"], e["grad_norm"], e["learning_rate"]) for e in trainer.state.log_history if "loss" in e]


def both(
    folder: Path, model: nn.Module, data: Any, stock: Any = Trainer, args: dict[str, Any] | None = None, **more: Any
):
    """Train the stock trainer and the one under test; return both."""
    ours = type("Ours", (HarmonyMixin, stock), {})
    trainers = []
    for kind, extra in ((stock, {}), (ours, {"ds_config": CONFIG})):
        cls = Seq2SeqTrainingArguments if issubclass(stock, Seq2SeqTrainer) else TrainingArguments
        trainer = kind(
            model=copy.deepcopy(model), args=arguments(folder, cls, **(args or {})), train_dataset=data, **extra, **more
        )
        trainer.train()
        trainers.append(trainer)
    return trainers


def assert_same(stock: Any, ours: Any) -> None:
    assert logged(stock) == logged(ours)
    assert len(logged(stock)) > 1
    for (name, expected), (_, actual) in zip(
        stock.model.named_parameters(), ours.model.named_parameters(), strict=True
    ):
        assert torch.equal(expected, actual), name


@pytest.mark.parametrize("args", [{}, {"max_grad_norm": 0.0}, {"label_smoothing_factor": 0.1}])
def test_language_modelling_with_a_last_group_that_is_not_full(tmp_path: Path, args: dict[str, float]) -> None:
    stock, ours = both(tmp_path, llama(), text(), args=args)
    assert_same(stock, ours)
    assert len(logged(ours)) == 6  # 11 micro-batches: groups of 4, 4 and 3, twice
    assert ours._engine.swap_report().micro_batches == 3
    report = ours._engine.plan_report()
    assert len(report.measured_step_ms) == 3  # full groups, but the first
    assert report.deviation == "it had 3 micro-batches, and the plan is for 4"
    assert 0 < ours._engine.memory_report().device_peak_bytes <= ours._engine.memory_report().planned_peak_bytes


def test_too_little_memory_is_said_in_the_words_of_the_arguments(tmp_path: Path) -> None:
    config = {"harmony": {"device": "cpu", "device_memory_gib": 20_000 / 2**30}}  # a layer alone takes 17,664 bytes
    trainer = HarmonyTrainer(model=llama(), args=arguments(tmp_path), ds_config=config, train_dataset=text())

    with pytest.raises(DoesNotFitError) as caught:
        trainer.train()
    assert "lower per_device_train_batch_size" in str(caught.value)
    assert "train_micro_batch_size_per_gpu" not in str(caught.value)


def test_a_model_loaded_in_bf16_trains_as_with_bf16_true(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = []
    for more in ({}, {"bf16": True}):
        trainer = HarmonyTrainer(
            model=llama().bfloat16(), args=arguments(tmp_path, **more), ds_config=CONFIG, train_dataset=text()
        )
        trainer.train()
        trained.append(trainer)
    assert_same(trained[1], trained[0])
    assert trained[0]._engine.memory_report().host_bytes["masters"] > 0
    assert caplog.text.count("it is trained as with bf16=True") == 1


def test_a_model_loaded_in_bf16_trains_as_with_the_stock_trainer_where_the_ds_config_says_so(tmp_path: Path) -> None:
    args = {"max_grad_norm": 0.0}
    stock = Trainer(model=llama().bfloat16(), args=arguments(tmp_path, **args), train_dataset=text())
    stock.train()
    config = {**CONFIG, "bf16": {"enabled": False}}
    ours = HarmonyTrainer(
        model=llama().bfloat16(), args=arguments(tmp_path, **args), ds_config=config, train_dataset=text()
    )
    ours.train()
    for (name, expected), (_, actual) in zip(
        stock.model.named_parameters(), ours.model.named_parameters(), strict=True
    ):
        assert torch.equal(expected, actual), name
    assert [loss for loss, *_ in logged(ours)] == [loss for loss, *_ in logged(stock)]


def test_one_process_that_sees_several_devices_drives_them_as_a_pipeline(tmp_path: Path) -> None:
    stock = Trainer(model=llama(), args=arguments(tmp_path), train_dataset=text(), eval_dataset=text(6))
    stock.train()
    args = arguments(tmp_path)
    assert args.n_gpu == 0
    args._n_gpu = 3  # as where torch sees three
    harmony = {"device": "cpu", "devices": 3, "pack_layers": 1}
    data = {"train_dataset": text(), "eval_dataset": text(6)}
    ours = HarmonyTrainer(model=llama(), args=args, ds_config={"harmony": harmony}, **data)
    ours.train()
    assert args.n_gpu == 1 and args.train_batch_size == 2
    assert len(ours.harmony_engine.memory_report().device_peaks) == 3
    assert_same(stock, ours)
    assert ours.evaluate()["eval_loss"] == stock.evaluate()["eval_loss"]


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Data that does not say how much it is: 11 micro-batches."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(text())


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0,
        )
    )  # fmt: skip


class Labelled(Stream):
    """Rows whose loss the Trainer divides by the number of micro-batches that it fetched together."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"input_ids": row["input_ids"], "labels": index % 2} for index, row in enumerate(text())])


class Swaps(TrainerCallback):
    """Number of micro-batches, and swapped bytes over the least possible, of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []
        self.trainer: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.trainer is not None:
            report = self.trainer.harmony_engine.swap_report()
            self.steps.append((report.micro_batches, report.ratio))


@pytest.mark.parametrize(
    "args",
    [{}, {"max_grad_norm": 0.0}, {"logging_steps": 3}, {"logging_strategy": "epoch"}, {"eval_strategy": "no"}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_stream_that_ends_within_a_group_whose_gradients_count_in_the_next_epoch(
    tmp_path: Path, kind: str, args: dict[str, Any]
) -> None:
    args = {"max_steps": 7, "eval_strategy": "epoch", "save_strategy": "epoch", **args}
    model, data = (llama(), Stream()) if kind == "llama" else (bert(), Labelled())
    swaps = Swaps()
    trainers = []
    for cls, extra in ((Trainer, {}), (HarmonyTrainer, {"ds_config": CONFIG, "callbacks": [swaps]})):
        trainer = cls(
            model=copy.deepcopy(model), args=arguments(tmp_path, **args), train_dataset=data,
            eval_dataset=list(data)[:6], **extra,
        )  # fmt: skip
        swaps.trainer = trainer if cls is HarmonyTrainer else None
        trained = trainer.train()
        trainers.append((trainer, trained.training_loss))
    (stock, stock_loss), (ours, our_loss) = trainers
    assert_same(stock, ours)
    assert our_loss == stock_loss
    assert ours._engine.global_steps == 7
    assert ours._engine.micro_steps == 37  # three epochs of 11, and a step of 4 that the three before it are part of
    if args.get("logging_strategy") != "epoch":  # which reads losses of micro-batches that could wait
        assert [count for count, _ in swaps.steps] == [4, 4, 7, 4, 7, 4, 7]
        assert {ratio for _, ratio in swaps.steps} == {1.0}


class Watched(TrainerCallback):
    """The gradients that a callback finds before the optimizer's step."""

    def __init__(self) -> None:
        self.found: list[list[torch.Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        model = getattr(model, "module", model)
        self.found.append([p.grad.detach().clone() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
def test_a_callback_finds_gradients_as_clipped(tmp_path: Path, max_grad_norm: float) -> None:
    trainers, watched = [], []
    for cls, extra in ((Trainer, {}), (HarmonyTrainer, {"ds_config": CONFIG})):
        watched.append(Watched())
        args = arguments(tmp_path, max_grad_norm=max_grad_norm)
        trainer = cls(model=llama(), args=args, train_dataset=text(), callbacks=[watched[-1]], **extra)
        trainer.train()
        trainers.append(trainer)
    assert_same(*trainers)
    norms = [norm for _, norm, _ in logged(trainers[0])]
    assert min(norms) > 0.5  # so that all are clipped
    for expected, actual in zip(watched[0].found, watched[1].found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_optimizers_that_step_in_the_backward_pass_are_refused_by_name(tmp_path: Path, optim: str) -> None:
    trainer = HarmonyTrainer(
        model=llama(), args=arguments(tmp_path, optim=optim), train_dataset=text(), ds_config=CONFIG
    )
    with pytest.raises(UnsupportedError, match=rf'optim="{optim}".*adamw_torch'):
        trainer.train()


def test_classification_with_evaluation_and_prediction(tmp_path: Path) -> None:
    model = bert()
    data = [{"input_ids": row["input_ids"], "labels": index % 2} for index, row in enumerate(text())]
    stock, ours = both(tmp_path, model, data, args={"eval_strategy": "epoch"}, eval_dataset=data[:6])
    assert_same(stock, ours)
    evaluated = [[e["eval_loss"] for e in t.state.log_history if "eval_loss" in e] for t in (stock, ours)]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) == 2
    assert [e.keys() for e in stock.state.log_history] == [e.keys() for e in ours.state.log_history]
    assert (stock.predict(data[:5]).predictions == ours.predict(data[:5]).predictions).all()


def test_a_compute_loss_of_the_users_own(tmp_path: Path) -> None:
    class Focused(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            logits = model(input_ids=inputs["input_ids"]).logits
            first = nn.functional.cross_entropy(logits[:, 0], inputs["input_ids"][:, 1])
            self.seen = getattr(self, "seen", 0) + int(first.item() > 0)
            return first + logits.square().mean()

    assert_same(*both(tmp_path, llama(), text(), Focused))


def test_sequence_to_sequence_with_generation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=61, d_model=16, d_ff=24, d_kv=8, num_layers=2, num_heads=2, dropout_rate=0.0,
            tie_word_embeddings=False, decoder_start_token_id=0,
        )
    )  # fmt: skip
    args = {"predict_with_generate": True, "generation_max_length": 6}
    stock, ours = both(tmp_path, model, text(), Seq2SeqTrainer, args)
    torch.testing.assert_close(
        torch.tensor(logged(stock)), torch.tensor(logged(ours)), rtol=1e-5, atol=1e-7
    )  # the position bias of all layers is one tensor, whose gradients are added up in another order
    assert (stock.predict(text(3)).predictions == ours.predict(text(3)).predictions).all()


def test_lora(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    assert_same(*both(tmp_path, model, text()))


def test_training_arguments_may_carry_the_ds_config_and_the_saved_model_is_stock(tmp_path: Path) -> None:
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {**dict.fromkeys(keys, "auto"), "zero_optimization": {"stage": 2}, **CONFIG}
    stock = Trainer(model=llama(), args=arguments(tmp_path), train_dataset=text())
    stock.train()
    harmony_ds.init_distributed()
    ours = HarmonyTrainer(model=llama(), args=arguments(tmp_path, deepspeed=config), train_dataset=text())
    ours.train()
    assert_same(stock, ours)
    ours.save_model(str(tmp_path / "model"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, ours.model.get_parameter(name)), name


def test_a_reference_model_is_put_on_the_device_as_without_the_mixin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = HarmonyTrainer(model=llama(), args=arguments(tmp_path), train_dataset=text(4), ds_config=CONFIG)
    monkeypatch.setattr(Accelerator, "device", torch.device("meta"))
    reference = trainer.accelerator.prepare_model(llama(), evaluation_mode=True)
    assert {parameter.device.type for parameter in reference.parameters()} == {"meta"}
    trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cpu"}


class Events(TrainerCallback):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.heard.append("begin")

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.heard.append("substep")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.heard.append("end")


class Noisy(Trainer):
    """Trainer that changes inputs by how many it has prepared, and asks whether a micro-batch is its group's last."""

    __hash__ = None  # type: ignore[assignment]  # as of a dataclass

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.prepared, self.told, self.events, self.rows = 0, [], Events(), torch.zeros(())
        self.add_callback(self.events)

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        self.prepared += 1
        changed = torch.randint(0, 61, (1,), generator=torch.Generator().manual_seed(self.prepared))
        return {**inputs, "input_ids": torch.where(inputs["input_ids"] == 3, changed, inputs["input_ids"])}

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.told.append(self.accelerator.sync_gradients)
        self.rows += 1  # in place
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs) / 4  # for the logs, as transformers itself once did


def test_inputs_are_prepared_once_in_order_and_callbacks_and_boundaries_are_the_trainers(tmp_path: Path) -> None:
    stock, ours = both(tmp_path, llama(), text(), Noisy)
    assert_same(stock, ours)
    assert stock.prepared == ours.prepared == 22
    assert stock.told == ours.told and stock.rows == ours.rows == 22
    assert stock.told[:5] == [False, False, False, True, False]
    assert stock.events.heard == ours.events.heard != []


def test_a_trainer_that_counts_while_it_prepares_is_refused(tmp_path: Path) -> None:
    class Counting(Trainer):
        _step = 0

        def _prepare_inputs(self, inputs: Any) -> Any:
            self._step += 1
            return super()._prepare_inputs(inputs)

    ours = type("Ours", (HarmonyMixin, Counting), {})
    with pytest.raises(UnsupportedError, match=r"_prepare_inputs counts micro-batches"):
        ours(model=llama(), args=arguments(tmp_path), train_dataset=text(), ds_config=CONFIG).train()


def test_a_trainer_that_generates_in_its_training_step_is_refused(tmp_path: Path) -> None:
    class Generating(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            inputs["input_ids"] = model.generate(inputs["input_ids"], max_new_tokens=2)
            inputs["labels"] = inputs["input_ids"]
            return super().training_step(model, inputs, num_items_in_batch)

    ours = type("Ours", (HarmonyMixin, Generating), {})(
        model=llama(), args=arguments(tmp_path), train_dataset=text(), ds_config=CONFIG
    )
    with pytest.raises(UnsupportedError, match=r"Ours generates in its training_step"):
        ours.train()
    ours.model.generate(text(1)[0]["input_ids"][None], max_new_tokens=2)  # the model is as it was


def test_a_mixin_after_the_trainer_is_refused_when_the_class_is_made() -> None:
    class Mine(Trainer): ...  # type: ignore[misc]

    with pytest.raises(UsageError, match=r"Put it first: class Wrong\(HarmonyMixin, Mine\)"):

        class Wrong(Mine, HarmonyMixin): ...

    with pytest.raises(TypeError, match="bases Trainer, HarmonyMixin"):

        class Plain(Trainer, HarmonyMixin): ...  # type: ignore[misc]
