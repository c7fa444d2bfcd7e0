"""Errors about unknown names: the nearest one that is known."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from harmony_ds.errors import ConfigError

_ELSEWHERE = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "wd": "weight_decay",
    **dict.fromkeys(("beta1", "beta2", "adam_beta1", "adam_beta2"), "betas"),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps", "warmup"), "warmup_num_steps"),
    **dict.fromkeys(("max_steps", "total_steps", "num_training_steps"), "total_num_steps"),
    **dict.fromkeys(("max_grad_norm", "clip_grad", "clip_grad_norm"), "gradient_clipping"),
    "batch_size": "train_batch_size",
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "train_micro_batch_size_per_gpu"),
    "grad_accum_steps": "gradient_accumulation_steps",
    "monitor_config": "tensorboard",
}
"""Names in other programs."""
_IN_PARAMS = (
    *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay", "momentum", "torch_adam")),
    *(f"scheduler.params.warmup_{name}" for name in ("num_steps", "max_lr", "min_lr", "type")),
    "scheduler.params.total_num_steps",
)
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE)
_OF_ACCELERATE = {"compute_environment", "distributed_type", "deepspeed_config", "deepspeed_plugin"}


def still_automatic(paths: Sequence[str]) -> str:
    """Return what is wrong with keys whose value is "auto", all of them at once."""
    names = ", ".join(f'"{path}"' for path in paths)
    say, it, the_keys, value = (
        ("says", "it", "the key", "a value") if len(paths) == 1 else ("say", "them", "the keys", "values")
    )
    return (
        f'{names} still {say} "auto": Hugging Face\'s Trainer and accelerate fill {it} in before they call initialize. '
        f"Without them, write {value} or leave {the_keys} out."
    )


def all_at_once(faults: Sequence[str]) -> str:
    """Return one error of the faults of a ds_config."""
    if len(faults) == 1:
        return faults[0]
    numbered = " ".join(f"({number}) {fault}" for number, fault in enumerate(faults, 1))
    return f"the ds_config has {len(faults)} faults: {numbered}"


def refuse_files_of_accelerate(unknown: Iterable[str]) -> None:
    """Raise ConfigError if one of the `unknown` keys is of accelerate's own file."""
    theirs = sorted(_OF_ACCELERATE.intersection(unknown))
    if theirs:
        raise ConfigError(
            f'this is accelerate\'s file, not a ds_config: it says "{theirs[0]}". Give it to `accelerate launch '
            "--config_file`; its deepspeed_config_file names a ds_config."
        )


def unknown_keys(unknown: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return an error about the key at each path of `unknown`, where the keys at `known` are; how to let them pass stands
    in the last one for which there is a way.
    """
    faults = [_unknown_key(path, known) for path in unknown]
    outside = [place for place, path in enumerate(unknown) if not path.startswith("harmony.")]
    if outside:
        faults[outside[-1]] += ' ("harmony": {"unknown_keys": "warn"} lets such keys pass.)'
    return faults


def _unknown_key(path: str, known: Iterable[str]) -> str:
    block, _, name = path.rpartition(".")
    prefix = f"{block}." if block else ""
    there = {one.removeprefix(prefix).split(".")[0] for one in known if one.startswith(prefix)}
    near = nearest(name, there)
    if near is None and block != "harmony":
        elsewhere = {one.rpartition(".")[2]: one for one in (*known, *_IN_PARAMS) if "." in one}
        near = elsewhere.get(_ELSEWHERE.get(name.lower(), name.lower()))
    hint = f'Did you mean "{near}"?' if near else f"Known keys: {', '.join(sorted(there))}."
    return f'unknown key "{name}" in {block or "the ds_config"}. {hint}'


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that is most likely meant; None if none is like it."""
    by_letters = {one.lower(): one for one in known}
    meant = _ELSEWHERE.get(name.lower(), name.lower())
    close = [meant] if meant in by_letters else difflib.get_close_matches(name.lower(), by_letters, n=1)
    return by_letters[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about `name`: the nearest of `known`, or all of them."""
    known = sorted(known)
    near = nearest(name, known)
    return f'Did you mean "{near}"?' if near else f"Known: {', '.join(known)}."


def check_params(path: str, taker: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Raise ConfigError for names in `params`, the block at `path`, that `taker` has no parameters for."""
    takes = [one for one in inspect.signature(taker).parameters.values() if one.name != "self"][1:]
    names = {one.name for one in takes if one.kind is not one.VAR_KEYWORD}
    if len(names) < len(takes):
        return
    unknown = [name for name in params if name not in names]
    if unknown:
        raise ConfigError(
            all_at_once([f'"{path}" does not take "{name}". {did_you_mean(name, names)}' for name in unknown])
        )


def refuse_text_numbers(path: str, params: Mapping[str, Any]) -> None:
    """Raise ConfigError for numbers in quotes in the block at `path`: optimizers and schedulers calculate with them."""
    texts = [
        (name, one)
        for name, value in params.items()
        for one in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(one, str) and _NUMBER.fullmatch(one)
    ]
    if texts:
        faults = [
            f'"{path}.{name}" is the text {one!r}: write the number {one}, without quotation marks (YAML takes 1e-4 for '
            "text, and 1.0e-4 for a number)."
            for name, one in texts
        ]
        raise ConfigError(all_at_once(faults))
