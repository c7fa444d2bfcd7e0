"""The optimizers that a ds_config, a program or a checkpoint may name, beside torch's others: one row each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harmony_ds.config.settings import Section
from harmony_ds.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Native:
    """DeepSpeed's compiled optimizer for the host.

    Attributes:
        cls, kind: its class, and the part of the names of its module, compiled op and functions.
        numbers, tensors: parameters of the C++ function: types of numbers, as compilers mangle them, and so many tensors.
    """

    cls: str
    kind: str
    numbers: str
    tensors: int

    @property
    def symbol(self) -> str:
        """The C++ function of a step, as compilers spell it."""
        function = f"ds_{self.kind}_step"
        return f"_Z{len(function)}{function}{self.numbers}RN2at6TensorE" + "S1_" * (self.tensors - 1)


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One optimizer.

    Attributes:
        names: in a ds_config, in small letters.
        keeps: tensors of its state, by their names in DeepSpeed's class.
        needs: an option without which it keeps nothing.
        classes: of the same formula and state, DeepSpeed's own first.
        native: DeepSpeed's compiled version for the host.
        on_device: torch's class that replaces it on an accelerator; for Lion, of the same size only.
        kept_as: names of its state in that class, where they differ.
        state_bits: of a number of its state; 0: those of the ds_config's dtype for states.
        refusal: the reason why it is not run.
        whole: it does not treat parameters one by one.
    """

    names: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    needs: str = ""
    classes: tuple[str, ...] = ()
    native: Native | None = None
    on_device: str = ""
    kept_as: Mapping[str, str] = field(default_factory=dict)
    state_bits: int = 0
    refusal: str = ""
    whole: bool = False


_MUP = "it belongs to the package mup, with optimizers of its own: pass one as optimizer=..."
_ONE_BIT = "1-bit optimizers compress what processes exchange, and gradients are exchanged whole"
_ADAMS_OF_8_BITS = ("AdamW8bit", "Adam8bit", "AdamWFp8", "AdamFp8", "PagedAdamW8bit", "PagedAdam8bit")
_ADAMS_OF_4_BITS = ("AdamW4bit", "Adam4bit")
_OTHERS_OF_8_BITS = ("Lion8bit", "PagedLion8bit", "RMSprop8bit", "Adagrad8bit")
"""Classes of torchao and bitsandbytes; none goes on with the state of another."""
OPTIMIZERS = (
    OptimizerRow(
        ("adam", "adamw"),
        ("exp_avg", "exp_avg_sq"),
        classes=("DeepSpeedCPUAdam", "FusedAdam", "ZenFlowCPUAdam", "AdamW", "Adam"),
        native=Native("DeepSpeedCPUAdam", "adam", "imfffffb", 4),
        on_device="AdamW",
    ),
    OptimizerRow(
        ("lion",),
        ("exp_avg",),
        classes=("DeepSpeedCPULion", "FusedLion"),
        native=Native("DeepSpeedCPULion", "lion", "imffff", 3),
        on_device="RMSprop",
    ),
    OptimizerRow(
        ("adagrad",),
        ("exp_avg_sq",),
        classes=("DeepSpeedCPUAdagrad",),
        native=Native("DeepSpeedCPUAdagrad", "adagrad", "imfff", 3),
        on_device="Adagrad",
        kept_as={"exp_avg_sq": "sum"},
    ),
    OptimizerRow(("sgd",), ("momentum_buffer",), needs="momentum", classes=("SGD",)),
    OptimizerRow((), ("sum",), classes=("Adagrad",)),
    OptimizerRow(("asgd",), ("ax",), classes=("ASGD",)),
    OptimizerRow(("rmsprop",), ("square_avg",), classes=("RMSprop",)),
    *(OptimizerRow((), ("exp_avg", "exp_avg_sq"), classes=(name,), state_bits=8) for name in _ADAMS_OF_8_BITS),
    *(OptimizerRow((), ("exp_avg", "exp_avg_sq"), classes=(name,), state_bits=4) for name in _ADAMS_OF_4_BITS),
    *(OptimizerRow((), ("exp_avg",), classes=(name,), state_bits=8) for name in _OTHERS_OF_8_BITS),
    OptimizerRow(("adafactor",), classes=("Adafactor",)),
    OptimizerRow(("lbfgs",), classes=("LBFGS",), whole=True),
    OptimizerRow(("sparseadam",), ("exp_avg", "exp_avg_sq"), classes=("SparseAdam",), whole=True),
    OptimizerRow((), classes=("LoraFAOptimizer",), whole=True),
    OptimizerRow(("lamb",), refusal="its kernel is CUDA's and steps whole layers on the device"),
    OptimizerRow(("muadam", "muadamw", "musgd"), refusal=_MUP),
    OptimizerRow(("onebitadam", "zerooneadam", "onebitlamb"), refusal=_ONE_BIT),  # an older DeepSpeed's
)
NOT_RUN = {name: row.refusal for row in OPTIMIZERS if row.refusal for name in row.names}
"""Names in a ds_config that are not run, each with the reason."""


def named(name: str) -> OptimizerRow | None:
    """Return the row of a name in a ds_config, in any case of letters."""
    return next((row for row in OPTIMIZERS if name.lower() in row.names), None)


def of_class(classes: Iterable[type]) -> OptimizerRow | None:
    """Return the row of the first of `classes`, a class and its bases, that has one."""
    return next((row for cls in classes for row in OPTIMIZERS if cls.__name__ in row.classes), None)


def kind_of(optimizer: object) -> str:
    """Return the name by which a checkpoint knows an optimizer: its class's, and its library's where several use that name.

    A class with state in few bits keeps it in a form of its library's own.
    """
    cls = type(optimizer)
    row = of_class((cls,))
    return f"{cls.__module__.partition('.')[0]}.{cls.__name__}" if row is not None and row.state_bits else cls.__name__


def same_formula(one: str, other: str) -> bool:
    """Return whether an optimizer of one class can go on with the state of one of another."""
    return one == other or any({one, other} <= set(row.classes) for row in OPTIMIZERS)


def keeper_of(keys: Iterable[str], counts_in_tensors: bool) -> str | None:
    """Return the class that keeps states of these names; torch's count steps in tensors, DeepSpeed's do not."""
    kept = set(keys) - {"step", "max_exp_avg_sq"}  # amsgrad keeps the latter beside
    row = next((row for row in OPTIMIZERS if row.keeps and not row.whole and set(row.keeps) == kept), None)
    if row is None:
        return None
    return row.on_device if counts_in_tensors and row.on_device in row.classes else row.classes[0]


def refuse_what_is_not_run(section: Section | None) -> None:
    """Raise ConfigError if `section` names an optimizer that DeepSpeed knows and that is not run here."""
    reason = None if section is None else NOT_RUN.get(section.type.lower())
    if section is not None and reason is not None:
        raise ConfigError(f'"optimizer.type": {section.type} is not run: {reason}.')


def state_numbers(name: str, options: Mapping[str, Any]) -> int | None:
    """Return the numbers per parameter that the optimizer of this name or class keeps; None if unknown."""
    row = _row_of(name)
    if row is None or row.refusal:
        return 2 if "adam" in name.lower() else None
    return 0 if row.needs and not options.get(row.needs) else len(row.keeps)


def state_bytes(name: str, itemsize: int) -> float:
    """Return the bytes of one of these numbers, which is `itemsize` where the optimizer does not quantize its state."""
    row = _row_of(name)
    return row.state_bits / 8 if row is not None and row.state_bits else itemsize


def _row_of(name: str) -> OptimizerRow | None:
    """Return the row of a name in a ds_config or of a class, in any case of letters."""
    name = name.lower()
    return next((row for row in OPTIMIZERS if name in (*row.names, *map(str.lower, row.classes))), None)
