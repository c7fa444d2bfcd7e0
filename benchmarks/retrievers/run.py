"""What do in-batch negatives take of the device, and how close are their weights? Under small budgets, without a setting.

    python -m benchmarks.retrievers.run

An encoder is trained with a loss over all rows of a micro-batch, under parts of the least memory with which whole rows run.
Writes benchmarks/results/retrievers.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import harmony_ds
from benchmarks.common import GIB, quiet, write_results
from harmony_ds import DoesNotFitError

ROWS, TOKENS, WIDTH, VOCABULARY, STEPS = (192, 2048), 32, 64, 512, 3
SHARES = (1 / 2, 1 / 4, 1 / 8)
LEAST = {"residency": "off", "pack_layers": 1, "stash": "host", "keep_graphs": False}
Program = Callable[[Any, Tensor, Tensor], Tensor]


class Encoder(nn.Module):
    """A BERT without dropout whose tokens are averaged; of one input, or of two that are joined."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bert = BertModel(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=4 * WIDTH,
                max_position_embeddings=TOKENS,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                attn_implementation="eager",
            ),
            add_pooling_layer=False,
        )

    def forward(self, tokens: Tensor, others: Tensor | None = None) -> Any:
        if others is not None:
            return self.forward(torch.cat([tokens, others])).chunk(2)
        return F.normalize(self.bert(tokens).last_hidden_state.mean(1), dim=-1)


def in_batch(queries: Tensor, keys: Tensor) -> Tensor:
    return F.cross_entropy(queries @ keys.T / 0.05, torch.arange(len(queries)))


def one_input(model: Any, queries: Tensor, _: Tensor) -> Tensor:
    encoded = model(queries)
    return in_batch(encoded, encoded.roll(1, 0))


def two_inputs_joined(model: Any, queries: Tensor, passages: Tensor) -> Tensor:
    return in_batch(*model(queries, passages))


def two_passes(model: Any, queries: Tensor, passages: Tensor) -> Tensor:
    return in_batch(model(queries), model(passages))


def batches(rows: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(2)
    shape = (rows, TOKENS)
    return [
        (torch.randint(VOCABULARY, shape, generator=source), torch.randint(VOCABULARY, shape, generator=source))
        for _ in range(STEPS)
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plainly(program: Program, rows: int) -> nn.Module:
    """Return the model after some steps of plain PyTorch."""
    model = Encoder()
    optimizer = sgd(model)
    for queries, passages in batches(rows):
        program(model, queries, passages).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(program: Program, rows: int, steps: int, harmony: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model after `steps` steps by the engine, and how they were done."""
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "harmony": {"device": "cpu", **harmony},
    }
    model = Encoder()
    engine, *_ = harmony_ds.initialize(model=model, optimizer=sgd(model), config=config)
    try:
        for queries, passages in batches(rows)[:steps]:
            engine.backward(program(engine, queries, passages))
            engine.step()
        memory = engine.memory_report()
        found = {
            "peak_bytes": memory.device_peak_bytes,
            "planned_bytes": memory.planned_peak_bytes,
            "rows_at_a_time": engine.plan.policy.backward_rows or rows,
            "swap_ratio": round(engine.swap_report().ratio, 4),
        }
    finally:
        engine.destroy()
    return model, found


def difference(model: nn.Module, plain: nn.Module) -> float:
    """Return the largest difference of a tensor, as a part of the largest tensor's norm or its own."""
    pairs = [(own.detach(), other.detach()) for own, other in zip(model.parameters(), plain.parameters(), strict=True)]
    return max(((own - other).norm() / other.norm().clamp(min=1e-2)).item() for own, other in pairs)


def main() -> None:
    quiet()
    results = []
    for rows in ROWS:
        for program in (one_input, two_inputs_joined, two_passes):
            plain = plainly(program, rows)
            whole = train(program, rows, 1, LEAST)[1]["peak_bytes"]
            for share in SHARES:
                budget = int(share * whole)
                row = {"program": program.__name__, "rows": rows, "whole_bytes": whole, "budget_bytes": budget}
                try:
                    model, found = train(program, rows, STEPS, {"device_memory_gib": budget / GIB})
                    row |= found | {"difference": difference(model, plain)}
                    if found["peak_bytes"] > budget:
                        raise RuntimeError(f"a step took {found['peak_bytes']:,} bytes of {budget:,}")
                except DoesNotFitError:
                    row["fits"] = False
                results.append(row)
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    write_results("retrievers", {"tokens": TOKENS, "width": WIDTH, "steps": STEPS, "runs": results})


if __name__ == "__main__":
    main()
