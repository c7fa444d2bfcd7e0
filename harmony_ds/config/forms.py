"""What values a key takes. DeepSpeed's keys take what its pydantic models take ("5" and 5.0 are integers, "true" is a
flag) and refuse the rest in their words; ours take JSON's own types only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict, StrictBool, StrictInt, StrictStr, TypeAdapter, ValidationError

_MUST = "{path} must be {name}, not {value!r}."
_IS = "{path} is {value!r}: it must be {name}."


@dataclass(frozen=True, slots=True)
class Form:
    """A sort of values.

    Attributes:
        name: for the table of keys, and for errors.
        type: the same for pydantic.
        says: the error; `{wrong}` is pydantic's own words.
    """

    name: str
    type: Any
    says: str = '"{path}": {wrong}, not {value!r}.'

    def read(self, path: str, value: object) -> Any:
        """The value of the key at `path`, from JSON.

        Raises:
            ValueError: the key does not take it.
        """
        try:
            return TypeAdapter(self.type).validate_python(value)
        except ValidationError as error:
            wrong = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(self.says.format(path=path, name=self.name, value=value, wrong=wrong)) from None


def within(form: Form, least: float | None = None, most: float | None = None, above: float | None = None) -> Form:
    """`form` with bounds: at least, at most, greater than."""
    bounds = [(">=", least), (">", above), ("<=", most)]
    name = form.name + "".join(f" {sign} {bound:g}" for sign, bound in bounds if bound is not None)
    return replace(form, name=name, type=Annotated[form.type, Field(ge=least, le=most, gt=above)])


def optional(form: Form) -> Form:
    """`form`, or null."""
    says = form.says.replace("{name}", form.name)
    return Form(f"{form.name} or null", form.type | None, says)


def choice(*known: object) -> Form:
    """One of `known`."""
    *most, last = map(repr, known)
    return Form(f"{', '.join(most)} or {last}", Literal[known])


def _number_of_the_loss_scale(value: object) -> float:
    number = _finite(value, "a number")
    if number < 0:
        raise ValueError("must be >= 0 (0 enables dynamic loss scaling)")
    return number


def _finite(value: object, wanted: str) -> float:
    """DeepSpeed's own checks of the loss scale's numbers, in its words."""
    if isinstance(value, bool):
        raise ValueError(f"must be {wanted}, not bool")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"must be {wanted}") from None
    if not math.isfinite(number):
        raise ValueError("must be a finite number (not inf/-inf/nan)")
    return number


def _or_never(value: object) -> object:
    return None if value == math.inf else value  # accelerate writes infinity for "never"


def _in(case: Callable[[str], str], *known: str) -> Form:
    """One of `known`, in any case of letters."""
    one = choice(*known)
    same = BeforeValidator(lambda value: case(value) if isinstance(value, str) else value)
    return replace(one, type=Annotated[one.type, same])


# ---- DeepSpeed's

DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
}
"""DeepSpeed's names of dtypes."""
ANYTHING = Form("any", Any)
_FLAG, _INTEGER, _NUMBER = Form("flag", bool), Form("integer", int), Form("number", float)
_TEXT, _BLOCK = Form("text", str), Form("object", dict[str, Any], '"{path}": Input should be an object, not {value!r}.')
_WHOLE = '"{path}" must be a whole number, not {value!r}.'
_LOSS_SCALE = BeforeValidator(_number_of_the_loss_scale)
_LOSS_SCALE_INTEGER = BeforeValidator(lambda value: _finite(value, "an integer"))

# ---- ours

_COUNT = Annotated[StrictInt, Field(ge=1)]


def _both_passes(value: object) -> object:
    """Rows of a layer call, forward and backward."""
    if isinstance(value, Mapping) and set(value) == {"forward", "backward"}:
        return value["forward"], value["backward"]
    return (value, value) if isinstance(value, int) else value


_AT_LEAST_1 = Form("a whole number of at least 1", _COUNT, _MUST)
_DEVICES_TYPE = Literal["all"] | _COUNT | Annotated[tuple[StrictStr, ...], Field(min_length=1)]
_GIB = Form("a number above 0", Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)], _MUST)
_ROWS = '"config", "auto", a whole number of rows of at least 1, or two such numbers, as {"forward": 8, "backward": 4}'
_ROWS_TYPE = Literal["config", "auto"] | Annotated[tuple[_COUNT, _COUNT], Strict()]

FORMS: dict[str, Form] = {
    "any": ANYTHING,
    "flag": _FLAG,
    "flag or null": optional(_FLAG),
    "integer": _INTEGER,
    "integer >= 0": within(_INTEGER, least=0),
    "integer > 0": within(_INTEGER, above=0),
    "number": _NUMBER,
    "number >= 0 <= 1": within(_NUMBER, least=0, most=1),
    "text": _TEXT,
    "text or null": optional(_TEXT),
    "object": _BLOCK,
    "object or null": optional(_BLOCK),
    "stage": choice(0, 1, 2, 3),
    "offload device": choice("none", "cpu", "nvme"),
    "dtype or null": optional(choice(*DTYPES)),
    "log level or null": optional(_in(str.lower, "debug", "info", "warning", "error", "critical")),
    "mean or sum": choice("mean", "sum"),
    "tag validation": _in(str.upper, "WARN", "IGNORE", "FAIL"),
    "count": Form("whole number or null", StrictInt | None, _WHOLE),
    "count or auto": Form('whole number, "auto" or null', StrictInt | Literal["auto"] | None, _WHOLE),
    "interval": Form("whole number or null", Annotated[StrictInt | None, BeforeValidator(_or_never)], _WHOLE),
    "loss scale": Form("number >= 0", Annotated[float, _LOSS_SCALE], "{path} {wrong}"),
    "loss scale integer": Form("integer", Annotated[int, _LOSS_SCALE_INTEGER], "{path} {wrong}"),
    # ours
    "switch": Form("true or false", StrictBool, _MUST),
    "amount": _AT_LEAST_1,
    "amount or null": optional(_AT_LEAST_1),
    "seed or null": optional(Form("a whole number", StrictInt, _MUST)),
    "gib or null": optional(_GIB),
    "file or null": optional(Form("the path of a JSON file", StrictStr, _MUST)),
    "device": Form('a name such as "cpu" or "cuda:0"', StrictStr, _MUST),
    "devices": Form(
        'a number of at least 1, "all", or a list of names such as ["cuda:0", "cuda:1"]', _DEVICES_TYPE, _IS
    ),
    "patterns": Form('a list of patterns such as ["model.layers.*"]', tuple[StrictStr, ...], _MUST),
    "weights": Form('"auto", "whole" or "share"', Literal["auto", "whole", "share"], _IS),
    "parallel": Form('"auto" or "pipeline"', Literal["auto", "pipeline"], _IS),
    "place": Form('"auto", "device" or "host"', Literal["auto", "device", "host"], _IS),
    "packs": Form(
        '"auto", "kept", "off" or a number of packs',
        Literal["auto", "kept", "off"] | Annotated[StrictInt, Field(ge=0)],
        _IS,
    ),
    "rows": Form(_ROWS, Annotated[_ROWS_TYPE, BeforeValidator(_both_passes)], _IS),
    "error or warn": Form('"error" or "warn"', Literal["error", "warn"], _IS),
}
"""By the word that stands in `keys.json`."""
