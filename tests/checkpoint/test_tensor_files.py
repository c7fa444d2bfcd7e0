"""Files of torch.save: plain data is read back as it was written, anything else refused, and a full disk named."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harmony_ds import CheckpointError
from harmony_ds.checkpoint import tensor_files
from harmony_ds.checkpoint.tensor_files import load_pickle, plain, write_pickle

TEXT = st.text(st.characters(codec="utf-8"), max_size=4)
HASHABLE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT, st.binary(max_size=4)),
    lambda children: st.one_of(st.lists(children, max_size=2).map(tuple), st.frozensets(children, max_size=2)),
    max_leaves=4,
)
PLAIN = st.one_of(
    HASHABLE,
    st.floats(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.integers(0, 99).map(lambda value: torch.tensor([value])),
)
VALUES = st.recursive(
    PLAIN,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.sets(HASHABLE, max_size=3),
        st.dictionaries(HASHABLE, children, max_size=3),
    ),
    max_leaves=10,
)


def same(a: Any, b: Any) -> bool:
    """Compare types all through, and values; numbers that are none are equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@given(VALUES)
def test_plain_data_is_read_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("value") / "x.pt"
    write_pickle(path, plain(value, "value"))
    assert same(load_pickle(path), value)


@given(st.dictionaries(TEXT, st.just(object()), min_size=1, max_size=2))
def test_other_objects_are_refused_by_their_place(value: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"state\.(.|\n)* is object, which a checkpoint cannot hold"):
        plain(value, "state")


@pytest.mark.parametrize("room_bytes", [0, 1, 100, 500, 2000, 5000])
def test_a_full_disk_is_named_wherever_it_stops_torch_save(
    room_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, write = [room_bytes], tensor_files._NewFile.write

    def full(file: Any, content: Any) -> int:
        if len(content) > room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= len(content)
        return write(file, content)

    monkeypatch.setattr(tensor_files._NewFile, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_pickle(tmp_path / "x.pt", {"a": torch.ones(1000), "b": torch.ones(300)})


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was executed",))


def test_files_of_torch_save_are_refused_by_their_fault_and_never_executed(tmp_path: Path) -> None:
    torch.save({"module": {}, "x": Bomb()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"PK no archive")
    for name, fault in (
        ("a", r"holds an object of _pytest.outcomes._Fail, which is not executed here"),
        ("b", "is no whole file of torch.save"),
        ("c", "is missing"),
    ):
        with pytest.raises(CheckpointError, match=rf"{name}.pt {fault}"):
            load_pickle(tmp_path / f"{name}.pt")


class ByName:
    """Is written as the attribute `name` of `kind`: so do Python 3.11.0 to 3.11.3 write members of an enum."""

    def __init__(self, kind: object, name: object) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> Any:
        return (getattr, (self.kind, self.name))


def test_a_stage_that_is_written_by_its_name_is_read_and_no_other_attribute(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"zero_stage": ByName(ZeroStageEnum, "gradients")}, path)
    assert load_pickle(path) == {"zero_stage": 2}
    others: list[tuple[object, object]] = [
        (ZeroStageEnum, "__subclasses__"),
        (bytes, "gradients"),
        ("", "upper"),
        (1, []),
    ]
    for kind, name in others:
        torch.save({"zero_stage": ByName(kind, name)}, path)
        with pytest.raises(CheckpointError, match=r"a.pt holds an object of getattr\("):
            load_pickle(path)
