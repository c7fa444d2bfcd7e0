"""Engines that need CUDA, for the third call: `harmony-ds bench --engines harmony,benchmarks.gpu.engines:roundpipe`.

None of them has run yet. `fsdp2-offload`: PyTorch's `fully_shard` with everything on the host. `roundpipe`: RoundPipe
(`pip install roundpipe`) in its synchronous mode, for the models it has presets of. `deepspeed-super-offload`: the host's
Adam in a process of its own beside the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from harmony_ds.bench.engines.adapter import Adapter, Loop, adam_section, checkpoint, clip_and_step, needs_adam
from harmony_ds.bench.engines.deepspeed import Zero, ZeroOffload
from harmony_ds.bench.workload import Batch, Workload
from harmony_ds.decomposer.find import find_layers
from harmony_ds.distributed.process_group import init_distributed
from harmony_ds.optim.optimizers import decoupled_decay

_PRESETS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM")


def adam_options(workload: Workload) -> dict[str, Any]:
    """Return the options that any Adam takes."""
    return {key: value for key, value in adam_section(workload).params.items() if key != "adam_w_mode"}


class Fsdp2Offload(Loop):
    """Layers sharded one by one, as FSDP's tutorial does; fp32 weights, computed with in the compute dtype."""

    def __init__(self, workload: Workload) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        init_distributed()
        self._clipping = workload.settings.gradient_clipping
        super().__init__(workload)
        model = self.model.float()  # rounded to the compute dtype before: the same start as the others'
        self._checkpointing = checkpoint(model)
        policy: dict[str, Any] = {
            "offload_policy": CPUOffloadPolicy(pin_memory=True),
            "mp_policy": MixedPrecisionPolicy(param_dtype=workload.settings.compute_dtype, reduce_dtype=torch.float32),
        }
        layers = find_layers(model).layers
        users = Counter(name for layer in layers for name in layer.parameters)
        for layer in layers:
            if all(users[name] == 1 for name in layer.parameters):  # tied weights stay with the whole
                fully_shard(layer.module, **policy)
        fully_shard(model, **policy)
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, fused=True, **adam_options(workload))

    def backward(self, loss: Tensor, micro_batches: int) -> None:
        (loss / micro_batches).backward()

    def update(self) -> None:
        clip_and_step(self._optimizer, self._parameters, self._clipping)

    def report(self) -> dict[str, Any]:
        return {"settings": {"gradient_checkpointing": self._checkpointing, "optimizer": "AdamW, fused, on the host"}}


class RoundPipe:
    """All micro-batches of a step in one call; the step ends with its update (`is_async=False`: no stale weights)."""

    def __init__(self, workload: Workload) -> None:
        roundpipe: Any = import_module("roundpipe")
        self._clipping, self._micro_batches = workload.settings.gradient_clipping, workload.accumulation
        config = roundpipe.RoundPipeRunConfig(num_microbatch=workload.accumulation)
        self._model = roundpipe.wrap_model_to_roundpipe(
            workload.subject.model, use_sequential_preset=True, model_run_config=config, optim_dtype=torch.float32
        )
        self._parameters = list(self._model.optim_parameters())
        decay = decoupled_decay(adam_section(workload))
        self._optimizer = roundpipe.optim.Adam(self._parameters, decoupled_weight_decay=decay, **adam_options(workload))

    def step(self, batches: list[Batch]) -> Tensor:
        whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        count = self._micro_batches
        loss: Tensor = self._model.forward_backward(input_kwargs=whole, loss_fn=lambda outputs, _: outputs.loss / count)
        self._model.step(self._update, is_async=False)
        return loss.detach()

    def _update(self) -> None:
        clip_and_step(self._optimizer, self._parameters, self._clipping)

    def drain(self) -> None:
        self._model.synchronize()
        torch.cuda.synchronize()

    def report(self) -> dict[str, Any]:
        return {"settings": {"is_async": False, "optim_dtype": "fp32", "num_microbatch": self._micro_batches}}


def on_cuda(why_not: Callable[[Workload], str | None] = lambda _: None) -> Callable[[Workload], str | None]:
    """Return the reasons of `why_not`, and where there is no CUDA device, that."""
    return lambda workload: why_not(workload) if workload.device == "cuda" else "it needs a CUDA device"


def lacks_preset(workload: Workload) -> str | None:
    """Refuse what RoundPipe cannot run."""
    if find_spec("roundpipe") is None:
        return "it is not installed: pip install roundpipe"
    kind = type(workload.subject.model).__name__
    return needs_adam(workload) if kind in _PRESETS else f"it has no preset for {kind}"


SUPER = Zero({"stage": 3}, {"optimizer": {"super_offload": True}}, lambda _: 1, lambda n: n, lambda n: n)
ENGINES = {
    "fsdp2-offload": Adapter(Fsdp2Offload, on_cuda(needs_adam)),
    "roundpipe": Adapter(RoundPipe, on_cuda(lacks_preset)),
    "deepspeed-super-offload": Adapter(partial(ZeroOffload, zero=SUPER), on_cuda()),
}
