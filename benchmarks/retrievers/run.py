"""What do in-batch negatives take of the device, and how close are their weights? Under small budgets, without a setting.

    python -m benchmarks.retrievers.run [--rows 192 2048] [--programs one_input] [--parts 2 4] [--write]

An encoder is trained with a loss over all rows of a micro-batch. Budgets hold a part of a layer call of all rows:

    least       device bytes of the smallest plan whose layer calls take all rows (each call a pack, all else on the host)
    weights     of one encoder layer: its weights, the sums of their gradients, and those of one slice
    call        least - weights: what a layer call of all rows takes, forward and backward, and what waits beside it
    budget      share x call + weights

Of two passes, the call is that of one of them.
`--write` puts what is measured into benchmarks/results/retrievers.json, in the place of what that has of the same program,
rows and part; docs/retrievers.md has the table of all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import harmony_ds
from benchmarks.common import GIB, MIB, RESULTS, quiet, write_results
from harmony_ds import DoesNotFitError

ROWS, TOKENS, WIDTH, VOCABULARY, STEPS = (192, 2048), 32, 64, 512, 3
PARTS = (2, 4, 8)
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


PROGRAMS: tuple[Program, ...] = (one_input, two_inputs_joined, two_passes)
_NAMES = tuple(program.__name__ for program in PROGRAMS)


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


def call_bytes(program: Program, rows: int) -> tuple[int, int]:
    """Return the bytes of a layer call of all rows, and those of a layer's weights; see the top of the file."""
    layer = Encoder().bert.encoder.layer[0]
    weights = 3 * sum(parameter.nbytes for parameter in layer.parameters())
    alone = one_input if program is two_passes else program
    return train(alone, rows, 1, LEAST)[1]["peak_bytes"] - weights, weights


def runs_of(program: Program, rows: int, parts: Sequence[int]) -> list[dict[str, Any]]:
    """Return what was measured of one program under each budget."""
    call, weights = call_bytes(program, rows)
    plain = plainly(program, rows)
    found = []
    for part in parts:
        budget = call // part + weights
        row = {"program": program.__name__, "rows": rows, "part": part, "call_bytes": call, "budget_bytes": budget}
        try:
            model, measured = train(program, rows, STEPS, {"device_memory_gib": budget / GIB})
            row |= measured | {"difference": difference(model, plain)}
            if measured["peak_bytes"] > budget:
                raise RuntimeError(f"a step took {measured['peak_bytes']:,} bytes of {budget:,}")
        except DoesNotFitError:
            row["fits"] = False
        found.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return found


def table(runs: list[dict[str, Any]]) -> str:
    """Return the table of docs/retrievers.md."""
    lines = [
        "| program | rows | budget: of a call, MiB | rows at a time | planned, measured MiB | difference |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        budget = f"1/{run['part']}, {run['budget_bytes'] / MIB:.2f}"
        begin = f"| {run['program'].replace('_', ' ')} | {run['rows']:,} | {budget} |"
        if "difference" in run:
            peaks = f"{run['planned_bytes'] / MIB:.2f}, {run['peak_bytes'] / MIB:.2f}"
            lines.append(f"{begin} {run['rows_at_a_time']} | {peaks} | {run['difference']:.0e} |")
        else:
            lines.append(f"{begin} refused | | |")
    return "\n".join(lines)


def write(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write `runs` among those that are in the results; return them all, in order."""
    known = json.loads((RESULTS / "retrievers.json").read_text(encoding="utf-8"))["runs"]
    by_place = {(one["rows"], _NAMES.index(one["program"]), one["part"]): one for one in (*known, *runs)}
    merged = [one for _, one in sorted(by_place.items())]
    write_results("retrievers", {"tokens": TOKENS, "width": WIDTH, "steps": STEPS, "runs": merged})
    return merged


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, nargs="+", default=ROWS)
    arguments.add_argument("--programs", nargs="+", choices=_NAMES, default=_NAMES)
    arguments.add_argument("--parts", type=int, nargs="+", default=PARTS)
    arguments.add_argument("--write", action="store_true")
    asked = arguments.parse_args()
    quiet()
    runs: list[dict[str, Any]] = []
    for rows in asked.rows:
        for program in PROGRAMS:
            if program.__name__ in asked.programs:
                measured = runs_of(program, rows, asked.parts)
                # What has been measured is kept if the rest takes too long.
                runs = write(measured) if asked.write else [*runs, *measured]
    print(table(runs))


if __name__ == "__main__":
    main()
