"""(e) How large a model trains adapters on this machine? LoRA on a base in 4 or 8 bits, made in seconds.

    python benchmarks/gpu/qlora.py [--model auto] [--cap-gib 24] [--tokens 8192]

`auto` is the largest of Llama 70B, Qwen3 32B and Llama 8B whose packed weights host memory takes. A weight of each shape is
quantized once, by bitsandbytes (NF4, double quantization) or else torchao (int8), and copied for every layer. Prints, of
the steps after the first: time, tokens per second beside the prediction, packed bytes, what was swapped beside the least
possible, and the device's peak and what its allocator reserved beside the plan. Without a GPU a small model runs.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from suite import ROOT, device, write
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import harmony_ds
from benchmarks.common import GIB
from harmony_ds.estimate.lora import linear_layers
from harmony_ds.offload.host_memory import free_host_bytes
from tests.quantized import LoraLinear

_LARGEST_FIRST = ("llama-3.1-70b", "qwen3-32b", "llama-3.1-8b")
_SMALL = "llama-7m"
_STEPS, _RANK_SCALE = 3, 0.02
_HOST_SHARE = 0.8
"""Of free host memory: the rest is for adapters, their optimizer state, and one layer that exists twice."""
_BYTES_A_WEIGHT = {"bitsandbytes": 0.52, "torchao": 1.01}


def main() -> None:
    args = _arguments()
    library = next((one for one in _BYTES_A_WEIGHT if importlib.util.find_spec(one) is not None), None)
    if library is None:
        raise SystemExit("error: neither bitsandbytes nor torchao is installed")
    is_small = device() == "cpu"
    name, rows, sequence = _chosen(args.model, library), 1, 64 if is_small else 1024
    accumulation = max(1, (256 if is_small else args.tokens) // sequence)
    cap_gib = 0.05 if is_small else args.cap_gib
    began = time.monotonic()
    model = _made(name, library)
    packed = sum(_stored_bytes(one.base) for one in model.modules() if isinstance(one, LoraLinear))
    print(f"{name}: {packed / GIB:.2f} GiB by {library}, made in {time.monotonic() - began:.0f} s", flush=True)
    engine, *_ = harmony_ds.initialize(
        model=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1.0,
            "harmony": {"device": device(), "device_memory_gib": cap_gib},
        },
    )
    data = _rows(model.config.vocab_size, rows, sequence)
    step_ms, losses = [], []
    for _ in range(_STEPS):
        begin = time.monotonic()
        losses.append(engine.train_batch(data).item())
        engine.finish_updates()
        step_ms.append(1e3 * (time.monotonic() - begin))
        print(f"step of {step_ms[-1]:,.0f} ms, loss {losses[-1]:.3f}", flush=True)
    steady_ms = statistics.median(step_ms[1:])
    held, swaps, plan = engine.memory_report(), engine.swap_report(), engine.plan_report()
    found: dict[str, Any] = {
        "model": name,
        "library": library,
        "packed_bytes": packed,
        "cap_gib": cap_gib,
        "tokens": rows * accumulation * sequence,
        "step_ms": step_ms,
        "losses": losses,
        "tokens_per_s": rows * accumulation * sequence / steady_ms * 1e3,
        "swapped_in_bytes": sum(swaps.host_to_device.values()),
        "ratio": swaps.ratio,
        "device_peak_bytes": held.device_peak_bytes,
        "planned_peak_bytes": held.planned_peak_bytes,
        "reserved_bytes": held.reserved_bytes,
        "allocator_retries": held.allocator_retries,
    }
    for key, value in found.items():
        print(f"{key:<22}{value}")
    print(plan, held, swaps, sep="\n")
    write(f"qlora-{'small' if is_small else name}-{library}", found)
    engine.destroy()


def _chosen(asked: str, library: str) -> str:
    """Return the name of the model: the one that was asked for, or the largest one that fits the host."""
    if device() == "cpu":
        return _SMALL
    if asked != "auto":
        return asked
    free = free_host_bytes()
    for name in _LARGEST_FIRST:
        needed = _host_bytes(name, library)
        print(f"{name}: {needed / GIB:.1f} GiB of {'unknown' if free is None else format(free / GIB, '.1f')} GiB free")
        if free is None or needed <= _HOST_SHARE * free:
            return name
    return _LARGEST_FIRST[-1]


def _host_bytes(name: str, library: str) -> float:
    """Return the bytes of a model with quantized linear layers, its ends in 16 bits."""
    model = _on_meta(name)
    inner = sum(layer.weight.numel() for layer in linear_layers(model).values())
    return inner * _BYTES_A_WEIGHT[library] + 2 * (sum(p.numel() for p in model.parameters()) - inner)


def _on_meta(name: str) -> Any:
    shape = AutoConfig.from_pretrained(str(ROOT / "benchmarks" / "models" / f"{name}.json"))
    shape.use_cache = False
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)


def _made(name: str, library: str) -> Any:
    """Return the model in host memory: linear layers quantized and frozen, each with an adapter; ends in bf16."""
    model = _on_meta(name)
    layers = linear_layers(model)
    quantize = _QUANTIZED[library]
    generator = torch.Generator().manual_seed(0)
    templates: dict[torch.Size, nn.Module] = {}
    for path, layer in layers.items():
        shape = layer.weight.shape
        if shape not in templates:
            linear = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16)
            with torch.no_grad():
                linear.weight.normal_(0, 0.02, generator=generator)
            templates[shape] = quantize(linear)
        adapter = LoraLinear(copy.deepcopy(templates[shape]), shape[1], shape[0], torch.bfloat16)
        nn.init.zeros_(adapter.b)
        parent, _, key = path.rpartition(".")
        setattr(model.get_submodule(parent), key, adapter)
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                made = torch.empty(parameter.shape, dtype=parameter.dtype)
                filled = made.fill_(1.0) if made.dim() == 1 else made.normal_(0, _RANK_SCALE, generator=generator)
                module._parameters[key] = nn.Parameter(filled, requires_grad=False)
    model.tie_weights()
    # Tables of rotary embeddings, which have no values on the meta device either, are made anew.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)
    return model.train()


def _nf4(linear: nn.Linear) -> nn.Module:
    import bitsandbytes

    made = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
    )
    weight = linear.weight.detach()
    made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
    quantized: nn.Module = made.to("cpu")
    return quantized


def _int8(linear: nn.Linear) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    holder = nn.Sequential(linear)
    quantize_(holder, Int8WeightOnlyConfig())
    holder[0].requires_grad_(False)
    return holder[0]


_QUANTIZED: dict[str, Callable[[nn.Linear], nn.Module]] = {"bitsandbytes": _nf4, "torchao": _int8}


def _stored_bytes(layer: nn.Module) -> int:
    """Return the bytes that the weight of a quantized layer is stored in, scales of bitsandbytes apart."""
    weight: Any = layer.weight
    if hasattr(weight, "__tensor_flatten__"):
        return sum(getattr(weight, name).nbytes for name in weight.__tensor_flatten__()[0])
    return int(weight.nbytes)


def _rows(words: int, rows: int, sequence: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(0, words, (rows, sequence), generator=generator)
        yield {"input_ids": ids, "labels": ids.clone()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [file.stem for file in sorted(Path(ROOT / "benchmarks" / "models").glob("*.json"))]
    parser.add_argument("--model", choices=["auto", *names], default="auto")
    parser.add_argument("--cap-gib", type=float, default=24)
    parser.add_argument("--tokens", type=int, default=8192, help="of one optimizer step, in rows of 1,024")
    return parser.parse_args()


if __name__ == "__main__":
    main()
