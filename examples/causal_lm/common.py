"""Parts of the three scripts: a text as bytes, a small model, the command line. Nothing here knows the engine."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BYTES = 256
MICRO_BATCH = 4
ACCUMULATION = 4


def parse_options(description: str) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="transformer layers (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="width, a multiple of 4 (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="bytes of text in a sample (default: %(default)s)")
    parser.add_argument("--text", type=Path, help="a text file (default: news from the gensim wheel)")
    return parser.parse_args()


def ds_config(steps: int) -> dict[str, object]:
    """Return a ds_config that DeepSpeed reads, too."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": steps,
    }


def make_model(options: argparse.Namespace) -> LlamaForCausalLM:
    """Return a new model over bytes."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=options.hidden,
            intermediate_size=2 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            max_position_embeddings=options.tokens,
            use_cache=False,
        )
    )


def samples(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Return as many samples as the steps need, from the text's beginning, repeated if it is short."""
    text = torch.frombuffer(bytearray(_path(options.text).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // options.tokens * options.tokens].view(-1, options.tokens)
    wanted = options.steps * MICRO_BATCH * ACCUMULATION
    return [{"input_ids": rows[i % len(rows)], "labels": rows[i % len(rows)]} for i in range(wanted)]


def _path(given: Path | None) -> Path:
    if given is not None:
        return given
    spec = importlib.util.find_spec("gensim")
    if spec is None or spec.origin is None:
        raise SystemExit("error: no text: pip install gensim, or name a file with --text FILE")
    return Path(spec.origin).parent / "test" / "test_data" / "lee_background.cor"
