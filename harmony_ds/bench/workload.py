"""Describe what every engine trains: the same model, the same samples in the same order, the same ds_config."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.config import Config, load_config
from harmony_ds.errors import BatchError
from harmony_ds.estimate.subject import Subject, load_subject

Batch = dict[str, Any]

_DROPOUT = ("attention_dropout", "dropout", "dropout_p", "attn_pdrop")


@dataclass(frozen=True)
class Workload:
    """Optimizer steps of one model.

    Attributes:
        model: as `harmony_ds.estimate.subject.load_subject` takes it.
        ds_config: read alike by all engines; adapters add what makes them offload.
        rows: of the ds_config's micro-batch, by which samples are drawn whatever `micro_batch` is.
        micro_batch, accumulation: how an engine cuts a step's samples.
        sequence: tokens in a row; None as the model says.
        device: "cpu" or "cuda".
        memory_gib: device memory that may be used. On CUDA no engine gets more; on the CPU harmony_ds alone keeps to it,
            since there the device's memory is the host's.
        threads: per process, for arithmetic on the CPU.
        devices: that train together, each in a process of its own with `accumulation` micro-batches.
    """

    model: str
    ds_config: dict[str, Any]
    rows: int
    micro_batch: int
    accumulation: int
    sequence: int | None = None
    device: str = "cpu"
    memory_gib: float | None = None
    threads: int = 1
    seed: int = 0
    devices: int = 1

    @property
    def samples(self) -> int:
        """Number of samples of one optimizer step, on all devices."""
        return self.micro_batch * self.accumulation * self.devices

    def cut(self, micro_batch: int) -> Workload:
        """Return the same samples in micro-batches of another size.

        Raises:
            BatchError: the step's samples are no multiple of it.
        """
        own = self.samples // self.devices
        if own % micro_batch:
            raise BatchError(f"a step of {own} samples cannot be cut into micro-batches of {micro_batch}.")
        return replace(self, micro_batch=micro_batch, accumulation=own // micro_batch)

    def config(self) -> dict[str, Any]:
        """Return the ds_config for this cut."""
        batch = {"train_micro_batch_size_per_gpu": self.micro_batch, "gradient_accumulation_steps": self.accumulation}
        config = copy.deepcopy({**self.ds_config, **batch})
        config.pop("train_batch_size", None)
        return config

    @cached_property
    def settings(self) -> Config:
        """The ds_config as harmony_ds reads it."""
        return load_config(self.config())

    @cached_property
    def subject(self) -> Subject:
        """The model in host memory, in the compute dtype, without dropout; the same weights in every process."""
        torch.manual_seed(self.seed)
        subject = load_subject(self.model, "cpu", self.rows, self.sequence)
        switch_dropout_off(subject.model)
        subject.model.to(self.settings.compute_dtype)
        return subject

    @property
    def sample_items(self) -> int:
        """Number of tokens of one sample; 1 where `subject.unit` is samples."""
        return self.subject.items // self._input_rows

    def batches(self, step: int, rank: int = 0) -> list[Batch]:
        """Return the micro-batches of optimizer step `step`: the sample inputs' tensors drawn anew, in their range.

        Devices take them in turn; these are those of device `rank`.
        """
        generator = torch.Generator().manual_seed(self.seed + 1 + step)
        inputs, rows = self.subject.inputs, self._input_rows
        of_samples = {name: value for name, value in _row_tensors(inputs).items() if len(value) == rows}
        drawn: dict[int, Tensor] = {}
        for value in of_samples.values():
            if id(value) not in drawn:
                drawn[id(value)] = _like(value, self.samples, generator)
        size = self.micro_batch
        return [
            {n: drawn[id(v)][i * size : (i + 1) * size] if n in of_samples else v for n, v in inputs.items()}
            for i in range(rank, self.accumulation * self.devices, self.devices)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the model: processes would share its memory, and train one another's.
        return Workload, tuple(getattr(self, one.name) for one in fields(self))

    @property
    def _input_rows(self) -> int:
        return next((len(value) for value in _row_tensors(self.subject.inputs).values()), 1)


def _row_tensors(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.ndim}


def switch_dropout_off(model: nn.Module) -> None:
    """Make losses comparable: engines draw random numbers each in their own order."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in _DROPOUT:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _like(sample: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    shape = (rows, *sample.shape[1:])
    if sample.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(sample.dtype)
    if sample.dtype == torch.bool:
        return sample[:1].expand(shape).clone()
    return torch.randint(int(sample.max()) + 1, shape, generator=generator, dtype=sample.dtype)
