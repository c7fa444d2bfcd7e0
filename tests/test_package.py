"""The public names, what importing costs, and the tree of errors."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import harmony_ds
from harmony_ds import errors

ERRORS = {name: one for name, one in inspect.getmembers(errors, inspect.isclass) if one.__module__ == errors.__name__}
DRAWING = errors.__doc__ or ""


def test_every_public_name_can_be_imported() -> None:
    for name in harmony_ds.__all__:
        found = getattr(harmony_ds, name)
        assert getattr(found, "__name__", name).split(".")[-1] == name


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="module 'harmony_ds' has no attribute 'initialise'"):
        _ = harmony_ds.initialise


@pytest.fixture(scope="module")
def imported() -> tuple[set[str], set[str]]:
    """Return the modules that a fresh process has imported after `import harmony_ds`, and after using all of it."""
    look = "print(*sys.modules)"
    code = f"import sys, harmony_ds\n{look}\nfrom harmony_ds import *\n{look}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = run.stdout.splitlines()
    return set(first.split()), set(second.split())


def test_importing_the_package_imports_nothing_heavy(imported: tuple[set[str], set[str]]) -> None:
    assert "harmony_ds" in imported[0]
    assert not imported[0] & {"torch", "deepspeed", "transformers", "numpy"}


def test_using_it_imports_neither_deepspeed_nor_transformers_nor_torchs_extras(
    imported: tuple[set[str], set[str]],
) -> None:
    assert "harmony_ds.engine" in imported[1]
    extras = {"deepspeed", "transformers", "torchvision", "torch._inductor", "matplotlib", "datasets"}
    assert not imported[1] & extras


# ---- errors


def drawn() -> dict[str, tuple[str | None, str]]:
    """Name -> (name of the parent in the drawing, what stands in brackets)."""
    found: dict[str, tuple[str | None, str]] = {}
    path: list[str] = []
    for line in DRAWING.splitlines():
        match = re.match(r"^    ([│├└─ ]*)(\w+)(?: \(([\w, ]+)\))?(?:\s|$)", line)
        if match and match[2].endswith("Error"):
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            found[match[2]] = (path[depth - 1] if depth else None, match[3] or "")
    return found


def test_every_error_is_in_the_drawn_tree() -> None:
    assert drawn().keys() == ERRORS.keys()
    assert len(ERRORS) >= 10


def test_every_error_has_the_drawn_parents_is_public_and_says_what_it_means() -> None:
    for name, error in ERRORS.items():
        parent, also = drawn()[name]
        bases = [base.__name__ for base in error.__bases__]
        assert bases[0] == (parent or "Exception")
        assert bases[1:] == (also.split(", ") if also else []), name
        assert name in harmony_ds.__all__
        assert getattr(harmony_ds, name) is error
        assert error.__doc__
        assert issubclass(error, harmony_ds.HarmonyError)
