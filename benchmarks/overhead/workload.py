"""What every engine is asked to do: one model, one stream of random tokens, one optimizer. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = dict[str, torch.Tensor]

ADAM: dict[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
CLIP_NORM = 1.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Engine(Protocol):
    """One way to train the workload's model."""

    def step(self, batches: list[Batch]) -> torch.Tensor:
        """One optimizer step over one group of micro-batches; the mean loss, detached."""

    def drain(self) -> None:
        """Waits for whatever `step` left under way."""

    def settings(self) -> dict[str, Any]:
        """Everything that was chosen, and what the engine made of it, for the report."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A Llama-shaped model and how it is trained.

    Attributes:
        dtype: "fp32" or "bf16": of weights and computation.
        micro_batch, sequence: shape of the tokens of one micro-batch.
        accumulation: micro-batches per optimizer step.
        checkpointing: whether engines that are not harmony_ds use transformers' gradient checkpointing.
        budget_gib: device memory budget of harmony_ds.
    """

    dtype: str = "fp32"
    hidden: int = 512
    layers: int = 8
    heads: int = 8
    intermediate: int = 1376
    vocabulary: int = 2048
    sequence: int = 128
    micro_batch: int = 2
    accumulation: int = 8
    checkpointing: bool = True
    budget_gib: float = 0.0
    seed: int = 0

    @property
    def parameters(self) -> int:
        """Elements of all weights; embedding and head are not tied."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def weight_gib(self) -> float:
        return self.parameters * DTYPES[self.dtype].itemsize / 2**30

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.micro_batch * self.sequence * self.accumulation

    def model(self) -> PreTrainedModel:
        """The model in host memory, in the workload's dtype; the same weights in every process."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(self.seed)
        config = LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.sequence,
            use_cache=False,
        )
        return LlamaForCausalLM(config).to(DTYPES[self.dtype]).train()

    def checkpointed_model(self) -> PreTrainedModel:
        """`model`, with transformers' own gradient checkpointing unless it is off."""
        model = self.model()
        if self.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of optimizer step `step`."""
        generator = torch.Generator().manual_seed(self.seed + 1 + step)
        shape = (self.accumulation, self.micro_batch, self.sequence)
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        return [{"input_ids": one, "labels": one} for one in tokens]

    def ds_config(self) -> dict[str, Any]:
        """What the DeepSpeed engines and harmony_ds read alike."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": CLIP_NORM,
            "optimizer": {"type": "AdamW", "params": ADAM},
            "bf16": {"enabled": self.dtype == "bf16"},
        }
