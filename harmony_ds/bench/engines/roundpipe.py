"""RoundPipe (LGPL-3.0, `pip install roundpipe`) in its synchronous mode, for the models it has presets of."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from harmony_ds.bench.engines.adapter import Adapter, adam_options, adam_section, clip_and_step, only_adam, only_on_cuda
from harmony_ds.bench.workload import Batch, Workload
from harmony_ds.offload.optimizers import decoupled_decay

_PRESETS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM")


class RoundPipe:
    """All micro-batches of a step in one call; the step ends with its update (`is_async=False`: no stale weights)."""

    def __init__(self, workload: Workload) -> None:
        roundpipe: Any = import_module("roundpipe")
        self._clipping = workload.settings.gradient_clipping
        self._micro_batches = workload.accumulation
        config = roundpipe.RoundPipeRunConfig(num_microbatch=workload.accumulation)
        self._model = roundpipe.wrap_model_to_roundpipe(
            workload.subject.model, use_sequential_preset=True, model_run_config=config, optim_dtype=torch.float32
        )
        self._parameters = list(self._model.optim_parameters())
        self._optimizer = roundpipe.optim.Adam(
            self._parameters, decoupled_weight_decay=decoupled_decay(adam_section(workload)), **adam_options(workload)
        )

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


def _unavailable(workload: Workload) -> str | None:
    if only_on_cuda(workload) is not None or find_spec("roundpipe") is None:
        return only_on_cuda(workload) or "it is not installed: pip install roundpipe"
    kind = type(workload.subject.model).__name__
    return only_adam(workload) if kind in _PRESETS else f"it has no preset for {kind}"


ENGINES = {"roundpipe": Adapter(RoundPipe, _unavailable)}
