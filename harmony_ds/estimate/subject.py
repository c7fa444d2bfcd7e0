"""Load the MODEL that a command line names: a module, and inputs for one micro-batch.

    path of a config.json, or of a directory with one    a Hugging Face model
    module:function                                       a function that returns a module, or (module, inputs)

On the meta device nothing is allocated; on the CPU the weights are random, which is enough to measure with.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from harmony_ds.errors import ConfigError

_logger = logging.getLogger(__name__)

_DEFAULT_SEQUENCE = 2048
_MOST_OFFSET = 8
"""Rows that a table of positions has beside those of positions: OPT's and BART's begin at 2."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is to be trained, and the keyword arguments of one micro-batch, for which it returns a loss."""

    model: nn.Module
    inputs: dict[str, Any]

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def unit(self) -> str:
        return "tokens" if "input_ids" in self.inputs else "samples"

    @property
    def items(self) -> int:
        """The number of tokens (or samples, see `unit`) in one micro-batch."""
        if "input_ids" in self.inputs:
            return int(self.inputs["input_ids"].numel())
        return next((len(value) for value in self.inputs.values() if isinstance(value, Tensor)), 1)


def load_subject(spec: str, device: str, rows: int, sequence: int | None = None) -> Subject:
    """Load the model that `spec` names, on `device` ("meta" or "cpu"), in training mode.

    Args:
        rows: of a micro-batch.
        sequence: tokens in a row; None: as many as the model takes, at most 2048.

    Raises:
        ConfigError: there is no such model, or no inputs can be made for it.
    """
    path = Path(spec)
    if path.exists():
        build = _hugging_face(path)
    elif ":" in spec:
        build = _function(spec)
    else:
        raise ConfigError(_missing(spec))
    with torch.device(device):
        made = build()
        model, inputs = made if isinstance(made, tuple) else (made, None)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f'"{spec}" returned {type(model).__name__}: it must return a module, or (module, inputs).'
            )
        if inputs is None and getattr(model, "config", None) is None:
            raise ConfigError(f'"{spec}" returned a module alone: return (module, inputs), inputs by keyword.')
        return Subject(model.train(), dict(_inputs(model, rows, sequence) if inputs is None else inputs))


def _missing(spec: str) -> str:
    text = f'there is no model "{spec}": name a Hugging Face config.json (or its directory), or module:function.'
    is_path = spec.endswith(".json") or ("/" in spec and Path(spec).parent.is_dir())
    if is_path or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", spec):
        return text
    folder = spec.rpartition("/")[2]
    return (
        f"{text} If it is a model of the Hugging Face Hub, fetch its config.json first (nothing is downloaded here): "
        f"hf download {spec} config.json --local-dir {folder}; then name the folder, {folder}."
    )


def _function(spec: str) -> Callable[[], Any]:
    module_name, _, name = spec.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f'"{spec}" cannot be imported: {error}.') from error
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise ConfigError(f'"{spec}" is no function but {type(function).__name__}.')
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(f'"{spec}" must be a function without arguments: {error}.') from error
    return function


def _hugging_face(path: Path) -> Callable[[], nn.Module]:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("Hugging Face models need transformers: pip install transformers") from error
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path} holds no config.json.")
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}.") from error
    if isinstance(described, dict) and "_diffusers_version" in described:
        raise ConfigError(
            f"{file} describes a {described.get('_class_name')} of diffusers, and not which inputs it is trained on: give "
            "module:function that returns (module, inputs), as examples/flux_lora/size.py does."
        )
    kind = described.get("model_type") if isinstance(described, dict) else None
    if isinstance(kind, str) and kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f'{file} describes a "{kind}", which is no model_type that transformers {transformers.__version__} knows: '
            "upgrade transformers, or give module:function that returns (module, inputs)."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(file))
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ConfigError(f"{file} describes no model that transformers knows: {_in_one_line(error)}") from error
    return partial(_class_for(transformers, config)._from_config, config)


def _in_one_line(error: Exception) -> str:
    """Return what an error says, without line breaks; of a check of a field, what the check found."""
    found = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ is not None else error
    return " ".join(str(found).split()) or type(found).__name__


def _class_for(transformers: Any, config: Any) -> Any:
    """Return the class that the config names, else the language model of its type."""
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    for kind in ("CausalLM", "Seq2SeqLM", "MaskedLM"):
        auto = getattr(transformers, f"AutoModelFor{kind}")
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ConfigError(
        f'transformers has no language model for "{config.model_type}": name the class in "architectures", or give '
        "module:function."
    )


def _inputs(model: nn.Module, rows: int, sequence: int | None) -> dict[str, Tensor]:
    """Make a micro-batch for a Hugging Face model, by what its forward takes."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = type(model).__name__
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        return {"pixel_values": torch.zeros(rows, config.num_channels, *size), "labels": torch.randint(2, (rows,))}
    if not hasattr(text, "vocab_size"):
        raise ConfigError(
            f"it is not known which inputs {kind} takes: give module:function that returns (module, inputs)."
        )
    longest = getattr(text, "max_position_embeddings", None)
    if sequence is not None and longest is not None and sequence > longest:
        table = _table_of_positions(model, longest)
        if table is not None:
            raise ConfigError(f"--sequence {sequence} is longer than the {longest} positions of the model's {table}.")
        _logger.warning(
            "rows of %d tokens are longer than the %d positions that the model's config names. Positions are computed, so "
            "that it runs; see that they are scaled as its authors say (rope_scaling).",
            sequence,
            longest,
        )
    ids = torch.randint(text.vocab_size, (rows, sequence or min(_DEFAULT_SEQUENCE, longest or _DEFAULT_SEQUENCE)))
    labels = torch.randint(2, (rows,)) if kind.endswith("ForSequenceClassification") else ids
    return {"input_ids": ids, "labels": labels}


def _table_of_positions(model: nn.Module, longest: int) -> str | None:
    """Return the name of a module or buffer that holds a vector for each of `longest` positions; None: there is none."""
    hugging_face: Any = model
    lookup = hugging_face.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    tables: dict[str, Tensor] = dict(model.named_buffers())
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and (lookup is None or module.weight is not lookup.weight):
            tables[name] = module.weight
    for name, table in tables.items():
        if table.dim() == 2 and table.is_floating_point() and 0 <= table.shape[0] - longest <= _MOST_OFFSET:
            return name
    return None
