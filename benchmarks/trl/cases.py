"""What is tried of TRL: its trainers, their losses, and the settings that change how they call the model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import trl
from datasets import Dataset
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

from benchmarks.trainer.compare import Case
from benchmarks.trainer.tiny import llama, tokenizer

Make = Callable[[], dict[str, Any]]
TRAINERS: dict[str, tuple[type, type]] = {
    **{name: (getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")) for name in
       ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")},
    "ORPO": (ORPOTrainer, ORPOConfig),
    "CPO": (CPOTrainer, CPOConfig),
    "TPO": (TPOTrainer, TPOConfig),
    "GKD": (GKDTrainer, GKDConfig),
}  # fmt: skip

TEXTS = [{"text": "the cat sat here" if i % 3 else "a dog ran very very far there"} for i in range(22)]
ANSWERS = [{"prompt": "the cat", "completion": " sat here" if i % 2 else " ran there the dog"} for i in range(22)]
PAIRS = [
    {"prompt": "the cat", "chosen": " sat here" if i % 2 else " ran", "rejected": " ran there the dog"}
    for i in range(22)
]
TRIPLES = [{**pair, "reference": " sat there" if i % 3 else " ran here"} for i, pair in enumerate(PAIRS)]
LABELLED = [{**answer, "label": i % 3 > 0} for i, answer in enumerate(ANSWERS)]
PROMPTS = [{"prompt": "the cat sat" if i % 3 else "a dog"} for i in range(12)]
CHATS = [
    {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
    for row in ANSWERS
]
DPO_LOSSES = (
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop sft "
    "sigmoid_norm"
).split()
GRPO_LOSSES = "grpo bnpo dr_grpo dapo cispo sapo luspo vespo".split()
COMMON: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False, "num_train_epochs": 1}
GENERATING: dict[str, Any] = {
    "num_generations": 2, "max_completion_length": 5, "max_steps": 4, "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4,
}  # fmt: skip


def cases() -> Iterator[Case]:
    """Yield all cases, in the order of the table."""
    yield from supervised()
    yield from preferences()
    yield from rewards()
    yield from generating()
    yield from experimental()


def case(kind: str, name: str, make: Make, settings: Mapping[str, Any] | None = None) -> Case:
    return Case(kind, name, *TRAINERS[kind], {**COMMON, **(settings or {})}, make)


@cache
def saved() -> Any:
    """Return a folder with a model, from which TRL loads its reference; it is there as long as this process."""
    folder = tempfile.TemporaryDirectory()
    llama().save_pretrained(folder.name)
    return folder


def loaded() -> Any:
    """Return the model of that folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(saved().name, dtype="float32")


def data(rows: list[dict[str, Any]], **more: Callable[[], Any]) -> dict[str, Any]:
    """Return a new model, the tokenizer, the rows as a dataset, and whatever else is made by the functions in `more`."""
    made = {"model": loaded(), "processing_class": tokenizer(), "train_dataset": Dataset.from_list(rows)}
    return {**made, **{key: one() for key, one in more.items()}}


def chat_tokenizer() -> Any:
    """Return a tokenizer with a chat template, which puts the messages one after the other."""
    made = tokenizer()
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def lora(task: str = "CAUSAL_LM") -> Any:
    """Return the settings of an adapter without dropout."""
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type=task)


def with_adapter() -> Any:
    """Return a model whose LoRA has been trained: TRL keeps a copy of that adapter as the reference."""
    import torch
    from peft import get_peft_model

    torch.manual_seed(1)
    settings = lora()
    settings.init_lora_weights = False
    return get_peft_model(loaded(), settings)


def supervised() -> Iterator[Case]:
    texts, answers = partial(data, TEXTS), partial(data, ANSWERS)
    short = {"max_length": 16}
    yield case("SFT", "text", texts, short)
    yield case("SFT", "prompt and completion", answers, short)
    yield case("SFT", "loss of the prompt, too", answers, {**short, "completion_only_loss": False})
    yield case("SFT", "truncated", texts, {"max_length": 4})
    yield case("SFT", "truncated at the start", texts, {"max_length": 4, "truncation_mode": "keep_end"})
    for strategy in ("bfd", "bfd_split", "wrapped"):
        packed = {"packing": True, "packing_strategy": strategy, "per_device_train_batch_size": 1}
        yield case("SFT", f"packing, {strategy}", texts, {**short, **packed})
    yield case("SFT", "padding-free", texts, {"padding_free": True, "max_length": None})
    yield case("SFT", "dft loss", texts, {**short, "loss_type": "dft"})
    yield case("SFT", "label smoothing", texts, {**short, "label_smoothing_factor": 0.1})
    yield case("SFT", "LoRA", partial(data, TEXTS, peft_config=lora), short)
    yield case("SFT", "gradient checkpointing", texts, {**short, "gradient_checkpointing": True})
    evaluated = {**short, "eval_strategy": "steps", "eval_steps": 2}
    yield case("SFT", "evaluation", partial(data, TEXTS, eval_dataset=lambda: Dataset.from_list(TEXTS)), evaluated)


def preferences() -> Iterator[Case]:
    pairs, labelled = partial(data, PAIRS), partial(data, LABELLED)
    for loss in DPO_LOSSES:
        smoothing = {"label_smoothing": 0.1} if loss in ("exo_pair", "robust") else {}
        yield case("DPO", f"loss {loss}", pairs, {"loss_type": [loss], **smoothing})
    mixed = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
    yield case("DPO", "three losses (MPO)", pairs, mixed)
    yield case("DPO", "label smoothing", pairs, {"label_smoothing": 0.1})
    for divergence in ("forward_kl", "js_divergence", "alpha_divergence"):
        yield case("DPO", divergence, pairs, {"f_divergence_type": divergence})
    yield case("DPO", "weighted (WPO)", pairs, {"use_weighting": True})
    yield case("DPO", "ld_alpha", pairs, {"ld_alpha": 0.5})
    yield case("DPO", "padding-free", pairs, {"padding_free": True})
    yield case("DPO", "a reference model", partial(data, PAIRS, ref_model=llama))
    yield case("DPO", "precomputed reference", pairs, {"precompute_ref_log_probs": True})
    yield case("DPO", "synchronized reference", pairs, {"sync_ref_model": True, "ref_model_sync_steps": 2})
    yield case("DPO", "LoRA: the reference is the base", partial(data, PAIRS, peft_config=lora))
    yield case("DPO", "LoRA: the reference is an adapter", partial(data, PAIRS, model=with_adapter))
    yield case("DPO", "LoRA, precomputed", partial(data, PAIRS, peft_config=lora), {"precompute_ref_log_probs": True})
    for loss in ("kto", "apo_zero_unpaired"):
        yield case("KTO", f"loss {loss}", labelled, {"loss_type": loss})
    yield case("KTO", "weights", labelled, {"desirable_weight": 2.0, "undesirable_weight": 0.5})
    yield case("KTO", "precomputed reference", labelled, {"precompute_ref_log_probs": True})
    yield case("KTO", "synchronized reference", labelled, {"sync_ref_model": True, "ref_model_sync_steps": 2})
    yield case("KTO", "LoRA: the reference is the base", partial(data, LABELLED, peft_config=lora))
    yield case("KTO", "LoRA: the reference is an adapter", partial(data, LABELLED, model=with_adapter))


def rewards() -> Iterator[Case]:
    pairs = partial(data, PAIRS, model=partial(llama, labels=1))
    yield case("Reward", "pairs", pairs)
    yield case("Reward", "centred", pairs, {"center_rewards_coefficient": 0.01})
    yield case("Reward", "LoRA", partial(pairs, peft_config=partial(lora, "SEQ_CLS")))


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards that tell completions apart."""
    return [len({token % 7 for token in ids}) + sum(ids) / 100 for ids in completion_ids]


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the completions' lengths."""
    return [float(len(ids)) for ids in completion_ids]


def generating() -> Iterator[Case]:
    prompts = partial(data, PROMPTS, reward_funcs=lambda: spread)
    for loss in GRPO_LOSSES:
        level = {"importance_sampling_level": "sequence"} if loss == "luspo" else {}
        yield case("GRPO", f"loss {loss}", prompts, {**GENERATING, "loss_type": loss, **level})
    again = {"steps_per_generation": 4, "num_iterations": 2, "num_generations": 4}
    for kind in ("GRPO", "RLOO"):
        yield case(kind, "completions used again", prompts, {**GENERATING, **again})
        yield case(kind, "no reference", prompts, {**GENERATING, "beta": 0.0})
        yield case(kind, "a reference (beta)", prompts, {**GENERATING, "beta": 0.1})
        synchronized = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}
        yield case(kind, "synchronized reference", prompts, {**GENERATING, **synchronized})
        with_lora = partial(data, PROMPTS, reward_funcs=lambda: spread, peft_config=lora)
        yield case(kind, "LoRA: the reference is the base", with_lora, {**GENERATING, "beta": 0.1})
        yield case(kind, "truncated completions masked", prompts, {**GENERATING, "mask_truncated_completions": True})
        several = partial(data, PROMPTS, reward_funcs=lambda: [spread, length])
        yield case(kind, "two rewards", several, {**GENERATING, "reward_weights": [1.0, 0.5]})
    sequence = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    yield case("GRPO", "GSPO", prompts, {**GENERATING, **sequence})
    yield case("GRPO", "two-sided clipping", prompts, {**GENERATING, "delta": 1.5, "epsilon_high": 0.28})
    yield case("GRPO", "tokens of high entropy", prompts, {**GENERATING, "top_entropy_quantile": 0.5})
    entropy = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 1.0}
    yield case("GRPO", "adaptive entropy", prompts, {**GENERATING, **entropy})
    yield case("GRPO", "rewards scaled by batch", prompts, {**GENERATING, "scale_rewards": "batch"})
    yield case("RLOO", "normalized advantages", prompts, {**GENERATING, "normalize_advantages": True})


def experimental() -> Iterator[Case]:
    pairs, triples = partial(data, PAIRS), partial(data, TRIPLES)
    sizes = {"max_length": 16, "max_completion_length": 8}
    yield case("ORPO", "pairs", pairs, sizes)
    yield case("ORPO", "LoRA", partial(data, PAIRS, peft_config=lora), sizes)
    for loss in ("sigmoid", "hinge", "ipo", "simpo", "alphapo"):
        yield case("CPO", f"loss {loss}", pairs, {**sizes, "loss_type": loss})
    yield case("CPO", "LoRA", partial(data, PAIRS, peft_config=lora), sizes)
    for loss in ("sigmoid", "hinge", "ipo", "tpo-l"):
        yield case("TPO", f"loss {loss}", triples, {"loss_type": loss})
    taught = partial(data, CHATS, processing_class=chat_tokenizer, teacher_model=llama)
    yield case("GKD", "the data's completions", taught, {"max_length": 16, "lmbda": 0.0})
    yield case("GKD", "generated completions", taught, {"max_length": 16, "lmbda": 1.0, "max_new_tokens": 4})
