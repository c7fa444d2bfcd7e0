"""QLoRA as people write it: `from_pretrained` with a quantization config, peft, the Trainer, merging after the training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    PeftType,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

from tests import quantized
from tests.engine.drive import config_of, engine_for, loop, seed_of
from tests.engine.test_quantized import ACCUMULATION, GROUPS, adamw_of, trained_by
from tests.integrations.test_trainer import both, logged
from tests.integrations.test_trl import PAIRS, kinds, settings_of
from tests.oracle import train_plainly


def configs() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig

    nf4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return {
        "nf4": BitsAndBytesConfig(
            **nf4,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=["lm_head"],
        ),
        "nf4, compute dtype unset": BitsAndBytesConfig(**nf4),
        "bitsandbytes int8": BitsAndBytesConfig(load_in_8bit=True),
        "torchao int8": TorchAoConfig(Int8WeightOnlyConfig()),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint in bf16."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=quantized.VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    path = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def loaded(folder: Path, how: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=configs()[how], device_map={"": "cpu"})


def tuned(folder: Path, how: str, dora: bool = False, dropout: float = 0.1) -> PeftModel:
    model = prepare_model_for_kbit_training(loaded(folder, how))
    torch.manual_seed(4)
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_dora=dora, lora_dropout=dropout)
    return get_peft_model(model, lora).train()


@pytest.mark.parametrize(("how", "dora"), [*((how, False) for how in configs()), ("nf4", True)])
def test_a_base_from_pretrained_trains_and_merges_as_in_plain_pytorch(
    folder: Path, how: str, dora: bool, tmp_path: Path
) -> None:
    plain, model = tuned(folder, how, dora), tuned(folder, how, dora)
    expected = train_plainly(plain, GROUPS, adamw_of(plain), clip=None, seed_of=seed_of)
    optimizer, batch = adamw_of(model), GROUPS[0][0]
    with engine_for(model, lambda _: optimizer, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        assert loop(engine, GROUPS) == expected
        with torch.no_grad(), model.disable_adapter():
            of_base = engine(**batch).logits.clone()
        model.save_pretrained(tmp_path)
    wanted = trained_by(plain)
    assert all(torch.equal(weight, wanted[name]) for name, weight in trained_by(model).items())
    with torch.no_grad(), plain.disable_adapter():
        assert torch.equal(of_base, plain(**batch).logits)
    reloaded = trained_by(PeftModel.from_pretrained(loaded(folder, how), tmp_path, is_trainable=True))
    assert all(torch.equal(reloaded[name], weight) for name, weight in wanted.items())
    merged, merged_plainly = model.merge_and_unload().eval(), plain.merge_and_unload().eval()
    with torch.no_grad():
        assert torch.equal(merged(**batch).logits, merged_plainly(**batch).logits)


METHODS = [
    VeraConfig(r=4, target_modules=["q_proj", "o_proj"]),
    IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    AdaLoraConfig(r=4, target_modules=["q_proj", "up_proj"], total_step=100),
    OFTConfig(r=0, oft_block_size=32, target_modules=["q_proj", "up_proj"]),
    PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.peft_type.value)
def test_other_methods_of_peft_train_on_a_quantized_base_as_in_plain_pytorch(folder: Path, method: PeftConfig) -> None:
    def build() -> PeftModel:
        # Prefixes are keys and values, which peft refuses beside checkpointing.
        checkpoints = method.peft_type is not PeftType.PREFIX_TUNING
        model = prepare_model_for_kbit_training(loaded(folder, "nf4"), use_gradient_checkpointing=checkpoints)
        torch.manual_seed(4)
        return get_peft_model(model, copy.deepcopy(method)).train()

    plain, model = build(), build()
    expected = train_plainly(plain, GROUPS, adamw_of(plain), clip=None, seed_of=seed_of)
    optimizer = adamw_of(model)
    with engine_for(model, lambda _: optimizer, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        assert loop(engine, GROUPS) == expected
        assert engine.swap_report().ratio == 1.0
    wanted = trained_by(plain)
    assert all(torch.equal(weight, wanted[name]) for name, weight in trained_by(model).items())


def test_two_adapters_on_one_base_train_in_turn(folder: Path) -> None:
    def build() -> PeftModel:
        model = tuned(folder, "nf4", dropout=0.0)
        torch.manual_seed(5)
        model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj", "down_proj"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "second"])
        return model

    plain, model = build(), build()
    expected = train_plainly(plain, GROUPS, adamw_of(plain), clip=None, seed_of=seed_of)
    optimizer, batch = adamw_of(model), GROUPS[0][0]
    with engine_for(model, lambda _: optimizer, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        assert loop(engine, GROUPS) == expected
        wanted = trained_by(plain)
        assert all(torch.equal(weight, wanted[name]) for name, weight in trained_by(model).items())
        assert any(".second." in name for name in wanted)
        plain.eval()
        engine.eval()
        for one in (plain, model):
            one.base_model.set_adapter("second")
        with torch.no_grad():
            assert torch.equal(engine(**batch).logits, plain(**batch).logits)


@pytest.mark.parametrize("how", ["nf4", "torchao int8"])
def test_trl_fine_tunes_and_aligns_adapters_on_a_quantized_base(
    folder: Path, how: str, tmp_path: Path, tokenizer: Any
) -> None:
    trl = pytest.importorskip("trl")
    # Without clipping: the stock trainer takes the norm of bf16 gradients in bf16.
    texts = Dataset.from_list(
        [{"text": "a dog ran there the cat sat" if row % 3 else "the cat sat"} for row in range(22)]
    )
    pairs = Dataset.from_list(PAIRS)
    made: list[list[Any]] = [[], []]
    for trainer, config, data in ((trl.SFTTrainer, trl.SFTConfig, texts), (trl.DPOTrainer, trl.DPOConfig, pairs)):
        for trainers, (kind, extra) in zip(made, kinds(trainer), strict=True):
            args = settings_of(config, tmp_path, max_length=16, max_grad_norm=0.0)
            model = tuned(folder, how, dropout=0.0)
            # TRL makes adapters beside bitsandbytes' weights bf16: no fp32 masters, as with the stock trainer.
            more = {"ds_config": {**extra["ds_config"], "bf16": {"enabled": False}}} if extra else {}
            one = kind(model=model, args=args, train_dataset=data, processing_class=tokenizer, **more)
            one.train()
            trainers.append(one)
    for stock, ours in zip(*made, strict=True):
        assert [loss for loss, _, _ in logged(stock)] == [loss for loss, _, _ in logged(ours)]
        wanted = trained_by(stock.model)
        assert all(torch.equal(weight, wanted[name]) for name, weight in trained_by(ours.model).items())
        assert ours.harmony_engine.swap_report().ratio == 1.0


@pytest.mark.parametrize("how", ["nf4", "torchao int8"])
def test_the_trainer_trains_adapters_on_a_quantized_base(folder: Path, how: str, tmp_path: Path) -> None:
    data = [{key: value[0] for key, value in quantized.batch(3 * row).items()} for row in range(22)]
    stock, ours = both(tmp_path, tuned(folder, how, dropout=0.0), data)
    assert logged(stock) == logged(ours) and len(logged(ours)) > 1
    wanted = trained_by(stock.model)
    assert all(torch.equal(weight, wanted[name]) for name, weight in trained_by(ours.model).items())
