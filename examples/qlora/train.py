"""QLoRA: adapters by peft beside a frozen base in 4 bits, which is swapped as the bytes that it is stored in.

    python examples/qlora/train.py                          # a small Llama with random weights, no download
    python examples/qlora/train.py --model path/to/model    # a model that you have

bitsandbytes quantizes the base (NF4, double quantization) while transformers loads it into host memory. The text is news
articles (from the gensim package).
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import harmony_ds

VOCABULARY = 2048
END = "<|end|>"


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and save the adapters; return the losses."""
    options = parse_options(arguments)
    text = load_text()
    if options.model is None:
        options.model = options.out / "base"
        make_base(options.model, text)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(options.model)(text)["input_ids"])
    model = load_quantized(options.model, options.rank)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = harmony_ds.initialize(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=options.learning_rate),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 8,
            "gradient_clipping": 1.0,
            "harmony": {"device_memory_gib": options.budget_gib},
        },
    )
    batches = rows_of(tokens, options.tokens)
    losses = []
    for step in range(1, options.steps + 1):
        losses.append(engine.train_batch(batches).item())
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    print(engine.swap_report())
    engine.destroy()
    model.save_pretrained(options.out)
    print(f"saved the adapters in {options.out}")
    return losses


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Adapters beside a base in 4 bits.")
    parser.add_argument("--model", help="name or path of a causal language model (default: a new small Llama)")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="in a row (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="default: %(default)s")
    # On a GPU, cuBLAS's workspaces and the allocator's segments take up to 0.38 GiB whatever the model.
    budget_gib = 0.75 if torch.cuda.is_available() else 0.016
    parser.add_argument("--budget-gib", type=float, default=budget_gib, help="device memory (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("outputs/qlora"), help="for adapters (default: %(default)s)")
    return parser.parse_args(arguments)


def load_quantized(path: Any, rank: int) -> Any:
    """Return the model with linear layers in 4 bits, in host memory, and adapters beside them."""
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    # Without a device map, bitsandbytes' models are loaded onto the GPU.
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=how, dtype=torch.float32, device_map={"": "cpu"}
    )
    model = prepare_model_for_kbit_training(
        model, use_gradient_checkpointing=False
    )  # the engine recomputes layers itself
    stored = sum(parameter.numel() for parameter in model.parameters() if parameter.dtype == torch.uint8)
    print(f"{stored:,} bytes hold the {2 * stored:,} quantized weights, beside their scales")
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def make_base(folder: Path, text: str) -> None:
    """Save a small Llama with random weights, and a tokenizer that is trained on `text`."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([text], VOCABULARY, special_tokens=[END], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token=END)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        use_cache=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def load_text() -> str:
    """Return 300 news articles."""
    spec = importlib.util.find_spec("gensim")
    if spec is None or spec.origin is None:
        raise SystemExit("error: no text: the package gensim is not installed: pip install gensim")
    file = Path(spec.origin).parent / "test" / "test_data" / "lee_background.cor"
    return file.read_text(encoding="utf-8").strip()


def rows_of(tokens: Tensor, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches of two rows of `length` tokens, from random places of the text."""
    generator = torch.Generator().manual_seed(0)
    while True:
        places = torch.randint(len(tokens) - length, (2, 1), generator=generator)
        rows = tokens[places + torch.arange(length)]
        yield {"input_ids": rows, "labels": rows.clone()}


if __name__ == "__main__":
    main()
