"""The document: same; different, and why; not there."""

from __future__ import annotations

from typing import Any

from tests.compatibility.record import brief, same
from tests.compatibility.scenes_names import PUBLIC

WHY = {
    "ds_config: an unknown key": "DeepSpeed ignores it, and trains with a setting that was never meant",
    "ds_config: bf16.enabled auto": "DeepSpeed takes its default silently",
    "ds_config refused: micro-batch size 0 with a batch size": "a message in the place of a division by zero",
    "ds_config refused: batch size auto": "a message in the place of a TypeError",
    "ds_config refused: flops_profiler": (
        "its hooks on every module, and torch's functions that it replaces, would be taken for the model's, and each layer "
        "is run more than once; FLOPs: torch.utils.flop_counter around a plain copy of the model, times: harmony-ds profile"
    ),
    "ds_config refused: ignore_unused_parameters false": (
        "parameters without a gradient are left as they are; DeepSpeed counts those that come to its buckets"
    ),
    "ds_config refused: nvme offload": "training state lives in host memory",
    "ds_config refused: no such file": "DeepSpeed's message is lost behind base64's own error",
    "the optimizer is a torch.optim.Optimizer": "this one passes for what it is around: torch's schedulers take it",
    "optimizer.needs_scaler(), stage 2, fp16 with a static scale": "a loss that nobody has scaled is refused then, too",
    "engine.get_batch_info()": "DeepSpeed returns its three methods, not called",
    "engine.get_data_parallel_rank()": "there is one process, and it is ready at once",
    "engine.get_sequence_parallel_group()": "there is one process",
    "initialize: a client's optimizer under offload": "any elementwise optimizer runs layer by layer",
    "backward() returns a graph": "the value is detached, so that it keeps no graph alive",
    "type of get_global_grad_norm()": "a float; DeepSpeed's is a tensor under ZeRO and a float elsewhere",
    "losses after weights and states were set": "the weight follows its master at once, not after the next step",
    "grad norm after gradients were set": "DeepSpeed's is that of the gradients before they were set",
    "learning rates of StepLR, stage 2": "torch's schedulers refuse DeepSpeed's wrapper, and take this one",
    "initialize: a scheduler object with an optimizer to be made": "it would step another optimizer than the one made",
    "no_sync() with ZeRO stage 2": "one process has nothing to synchronize",
    "wall_clock_breakdown: names of get_wall_clock_timers()": "a group's tasks are timed, with the swaps",
    "safe_get_full_grad in the middle of a group": "what has gathered so far; DeepSpeed shows the step before's until the "
    "boundary",
    "bf16: masters before the first step": "the model's own values; DeepSpeed rounds them to bf16 first",
    "bf16: optimizer.gradient_accumulation_dtype": "gradients are added up in fp32 unless data_types.grad_accum_dtype says "
    "bf16",
    "initialize: an optimizer that ZeRO was not tested with": "any elementwise optimizer runs layer by layer",
    "bf16: gradients added up in fp16": "a third dtype would round sums once more: fp32, or the one that computes",
    "bf16: buffer_dtype": "cast buffers in the model, where its author knows which of them have to stay in fp32",
    "bf16: bf16_master_weights_and_grads": "masters are fp32, and lie in host memory",
    "bf16: a frozen parameter of float8": "layers compute in fp32, bf16 or fp16; what is not trained may be a buffer of "
    "any dtype",
    "fp16: gradients put on parameters by hand": "whether they are scaled cannot be told; in bf16 and fp32 they are used",
    "two losses of one micro-batch, gradients looked at between": "its layers have been propagated through, and let go: "
    "propagate back from the sum, or call the engine for each",
    "torch.func.grad through the engine": "micro-batches run later and layer by layer; engine.module(...) computes at once",
    "loss.backward(), stage 0": "it runs as with the other stages",
    "update of outputs['loss'].backward()": "DeepSpeed divides once more by the accumulation steps at each output that the "
    "loss was computed from; here a gradient is divided once, where it enters",
}
"""Each row that differs, with its reason. A row that is not here is the same, or the test fails."""
NOT_THERE: dict[str, str] = {}
_HEAD = """# Compatibility with DeepSpeed 0.19.8

Each row is asked of both engines, on the CPU, by the same lines: `python -m tests.compatibility.run` asks them and
writes this page; a test does so too and fails where the page, or a row, is out of date. *Same* means: equal values
(numbers to 1e-5, losses in half precision to 1e-2), or errors that the same `except` catches and that say the same. The
rows are in `tests/compatibility/scenes_*.py`.
"""
_LEFT_OUT = """## Names that are left out

Reading one raises an AttributeError that names it, so that `hasattr` says no. They are DeepSpeed's partitions, buckets,
communication, hooks and swapping, which have no counterpart here; names that begin with an underscore, and what ZeRO-3
puts on parameters and modules (`ds_*`), are left out, too. Names of the loss scale, and others that the ds_config decides,
can be read and not be set.
"""


def split(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """The names of rows that are the same, different, not there. Lists of public names are none: see `left_out`."""
    assert theirs.keys() == ours.keys()
    theirs = {name: row for name, row in theirs.items() if not name.startswith(PUBLIC)}
    equal = [name for name in theirs if same(theirs[name], ours[name])]
    others = [name for name in theirs if name not in equal]
    return equal, [name for name in others if name not in NOT_THERE], [name for name in others if name in NOT_THERE]


def left_out(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """A line for each list of public names: those of DeepSpeed's that are not here."""
    lines = []
    for row in (name for name in theirs if name.startswith(PUBLIC)):
        missing = [f"`{name}`" for name in theirs[row] if name not in ours[row]]
        lines.append(f"- {row.removeprefix(PUBLIC).strip()} ({len(missing)}): {', '.join(missing)}")
    return lines


def document(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """docs/compatibility.md."""
    equal, different, missing = split(theirs, ours)
    counted = [*equal, *different, *missing]
    lines = [
        _HEAD,
        f"{len(counted)} rows: {len(equal)} same, {len(different)} different, {len(missing)} not there.",
        "",
    ]
    lines += ["## Different, and why", "", "| row | DeepSpeed | harmony_ds | why |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {_cell(theirs[name])} | {_cell(ours[name])} | {WHY.get(name, '**unexplained**')} |"
        for name in different
    ]
    if missing:
        lines += ["", "## Not there", "", "| row | why, and what to do |", "|---|---|"]
        lines += [f"| {name} | {NOT_THERE[name]} |" for name in missing]
    lines += ["", _LEFT_OUT, *left_out(theirs, ours)]
    lines += ["", "## Same", "", "| row | both |", "|---|---|"]
    lines += [f"| {name} | {_cell(ours[name])} |" for name in equal]
    return "\n".join(lines) + "\n"


def _cell(outcome: Any) -> str:
    return "`" + brief(outcome).replace("|", "/").replace("\n", " ").replace("`", "'") + "`"
