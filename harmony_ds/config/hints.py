"""Names that nobody knows, and those that may have been meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from harmony_ds.errors import ConfigError

# What other programs call it.
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


AUTO = (
    "Hugging Face's Trainer and accelerate fill it in before they call initialize. Without them, write a value or leave "
    "the key out."
)


def meant_by(name: str) -> str:
    """A key's name here, for what other programs call it."""
    return _ELSEWHERE.get(name.lower(), name.lower())


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most likely meant; None if none is like it."""
    by_letters = {one.lower(): one for one in known}
    meant = meant_by(name)
    close = [meant] if meant in by_letters else difflib.get_close_matches(name.lower(), by_letters, n=1)
    return by_letters[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """As the end of an error; what there is, where nothing is like it."""
    known = sorted(known)
    near = nearest(name, known)
    return f'Did you mean "{near}"?' if near else f"Known: {', '.join(known)}."


def check_params(path: str, taker: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name in `params`, the block at `path`, that `taker` has no parameter for."""
    takes = [one for one in inspect.signature(taker).parameters.values() if one.name != "self"][1:]
    names = {one.name for one in takes if one.kind is not one.VAR_KEYWORD}
    for name in params:
        if name not in names and len(names) == len(takes):
            raise ConfigError(f'"{path}" does not take "{name}". {did_you_mean(name, names)}')


def refuse_text_numbers(path: str, params: Mapping[str, Any]) -> None:
    """Raises ConfigError for a number in quotes in the block at `path`: optimizers and schedulers calculate with it."""
    for name, value in params.items():
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, str) and _is_number(one):
                raise ConfigError(
                    f'"{path}.{name}" is the text {one!r}: write the number {one}, without quotation marks (YAML takes '
                    "1e-4 for text, and 1.0e-4 for a number)."
                )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
