"""RoundPipe (LGPL-3.0, `pip install roundpipe`) in its synchronous mode, for the models it has presets of."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.bench.engines._accumulation import adam_options, adam_section
from harmony_ds.bench.engines._accumulation import unavailable as _adam_alone
from harmony_ds.bench.task import Batch, Task
from harmony_ds.offload.optimizers import decoupled_decay

_PRESETS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM")


class RoundPipe:
    """All micro-batches of a step in one call; the step ends with its update (`is_async=False`: no stale weights)."""

    def __init__(self, task: Task) -> None:
        roundpipe: Any = import_module("roundpipe")
        self._clipping = task.settings.gradient_clipping
        self._micro_batches = task.accumulation
        config = roundpipe.RoundPipeRunConfig(num_microbatch=task.accumulation)
        self._model = roundpipe.wrap_model_to_roundpipe(
            task.subject.model, use_sequential_preset=True, model_run_config=config, optim_dtype=torch.float32
        )
        self._parameters = list(self._model.optim_parameters())
        self._optimizer = roundpipe.optim.Adam(
            self._parameters, decoupled_weight_decay=decoupled_decay(adam_section(task)), **adam_options(task)
        )

    def step(self, batches: list[Batch]) -> Tensor:
        whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        count = self._micro_batches
        loss: Tensor = self._model.forward_backward(input_kwargs=whole, loss_fn=lambda outputs, _: outputs.loss / count)
        self._model.step(self._update, is_async=False)
        return loss.detach()

    def _update(self) -> None:
        if self._clipping > 0:
            nn.utils.clip_grad_norm_(self._parameters, self._clipping)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def drain(self) -> None:
        self._model.synchronize()
        torch.cuda.synchronize()

    def report(self) -> dict[str, Any]:
        return {"settings": {"is_async": False, "optim_dtype": "fp32", "num_microbatch": self._micro_batches}}


def unavailable(task: Task) -> str | None:
    if task.device != "cuda":
        return "it needs a CUDA device"
    if find_spec("roundpipe") is None:
        return "it is not installed: pip install roundpipe"
    kind = type(task.subject.model).__name__
    if kind not in _PRESETS:
        return f"it has no preset for {kind}"
    return _adam_alone(task)


def build(task: Task) -> RoundPipe:
    return RoundPipe(task)
