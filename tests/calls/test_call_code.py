"""What the code of a model's classes reads: everything of the user's own, nothing of what is installed."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from harmony_ds.calls.call_code import read_by

SOURCE = """
from torch import nn

class Deep:
    scale = 2.0

class Settings:
    deep = Deep
    unused = 1

class Other:
    settings = Settings

def by_function():
    return Settings.deep

def by_another():
    return Other.settings.deep.scale

class Model(nn.Module):
    def forward(self, x):
        by_function()
        return x * by_another()
"""


def model_of(name: str, source: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType(name)
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source, str(file), "exec"), module.__dict__)
    return module.__dict__["Model"]


def names_of(model: type[nn.Module]) -> set[str]:
    return {str(place.name) for place in read_by(model)}


def test_a_class_that_several_ways_lead_to_is_read_by_the_names_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = names_of(model_of("one_users_own", SOURCE, tmp_path / "one_users_own.py", monkeypatch))
    assert {"Settings.deep", "Other.settings", "Deep.scale"} <= found
    assert "Settings.unused" not in found


@pytest.mark.parametrize("how", ["site-packages", "beside its metadata", "known by name"])
def test_what_is_installed_is_not_gone_through(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "diffusers" if how == "known by name" else f"library_{len(how)}"
    folder = tmp_path / "site-packages" if how == "site-packages" else tmp_path
    (folder / name).mkdir(parents=True)
    if how == "beside its metadata":
        (folder / f"{name}-1.0.dist-info").mkdir()
    library = model_of(name, SOURCE, folder / name / "__init__.py", monkeypatch)
    assert "Deep.scale" not in names_of(library)


def test_code_of_many_classes_that_name_each_other_is_gone_through_once_for_each_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 40
    classes = "\n".join(
        f"class C{i}:\n"
        + "\n".join(f"    def m{i}_{j}(self): return C{(i + j) % count}.m{j}_{i}" for j in range(count))
        for i in range(count)
    )
    source = f"from torch import nn\n{classes}\nclass Model(nn.Module):\n    def forward(self, x): return C0.m0_0(x)\n"
    model = model_of("many_classes", source, tmp_path / "many_classes.py", monkeypatch)
    from harmony_ds.calls import call_code

    visits = 0
    value = call_code._Reader._value

    def counted(self: Any, *arguments: Any) -> None:
        nonlocal visits
        visits += 1
        value(self, *arguments)

    monkeypatch.setattr(call_code._Reader, "_value", counted)
    read_by(model)
    assert count < visits <= 8 * count**2
