"""Every command on a page is there, with every option that it is given. (What commands do, others test.)"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from harmony_ds import cli
from tests.docs.pages import DOCUMENTS, EXAMPLES, ROOT, Snippet, shell_lines

LINES = [line for page in (*DOCUMENTS, *EXAMPLES) for line in shell_lines(page)]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Callable[[str], str]:
    """Return a function that returns the text of `harmony-ds COMMAND --help`, uncut."""

    def ask(command: str) -> str:
        monkeypatch.setenv("COLUMNS", "300")
        monkeypatch.setenv("TERMINAL_WIDTH", "300")
        monkeypatch.setattr(sys, "argv", ["harmony-ds", command, "--help"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code, f"there is no command harmony-ds {command}"
        return capsys.readouterr().out

    return ask


def options_in(words: list[str]) -> list[str]:
    """The options of a line; what a page puts in brackets may be left out, and is checked all the same."""
    return [word.strip("[]").partition("=")[0] for word in words if word.strip("[").startswith("--")]


def check_program(words: list[str], help_of: Callable[[str], str]) -> None:
    program, rest = words[0], words[1:]
    if program == "harmony-ds":
        text = "" if rest[0] == "--version" else help_of(rest[0])
        rest = [word for word in rest if word != "--version"]
        missing = [option for option in options_in(rest) if not re.search(rf"{option}\b", text)]
        assert not missing, f"harmony-ds {rest[0]} has no {missing}"
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert rest[0] in targets
    elif program == "pip":
        assert rest[0] == "install"
        extras = re.findall(r"(?:harmony_ds|\.)\[(\w+)\]", " ".join(rest))
        assert (
            set(extras)
            <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
        )
    elif rest[:2] == ["-m", "pytest"] or program == "pytest":
        paths = [word for word in rest if "/" in word]
        assert paths
        assert all((ROOT / path).exists() for path in paths)
    else:
        check_python(rest)


def check_python(rest: list[str]) -> None:
    if rest[0] == "-m":
        assert find_spec(rest[1]), f"there is no module {rest[1]}"
        return
    if rest[0] == "train.py":  # the reader's own
        return
    script = ROOT / rest[0]
    assert script.is_file()
    beside = [script, *script.parent.glob("*.py")]
    sources = "".join(path.read_text(encoding="utf-8") for path in beside)
    missing = [option for option in options_in(rest) if f'"{option.replace("--no-", "--")}"' not in sources]
    assert not missing, f"{rest[0]} has no {missing}"
    files = [word for word in rest[1:] if word.startswith(("ds_configs/", "benchmarks/"))]
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize("line", LINES, ids=str)
def test_what_is_on_the_line_exists(line: Snippet, help_of: Callable[[str], str]) -> None:
    check_program(shlex.split(line.text, comments=True), help_of)


@pytest.mark.parametrize(
    "text",
    [
        "harmony-ds guess MODEL",
        "harmony-ds estimate MODEL --colour",
        "make tea",
        "python examples/resume/train.py --colour",
    ],
)
def test_what_does_not_exist_is_noticed(text: str, help_of: Callable[[str], str]) -> None:
    with pytest.raises(AssertionError):
        check_program(shlex.split(text), help_of)
