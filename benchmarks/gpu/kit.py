"""Gather in one folder all that a machine without a network needs to run the GPU suite: `make gpu-kit`.

    python benchmarks/gpu/kit.py [--folder gpu-kit] [--python-version 3.12]

The folder gets the sources (`source/`), wheels of DeepSpeed, built here, and of everything but torch and transformers
that the suite imports (`wheels/`), text to train on (`text/`), and `run.sh`. On the machine, which needs torch with CUDA,
transformers and pip, `bash gpu-kit/run.sh 1` is the first of three calls: see README.md.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "pretrain_gpt2"))

LIMIT_BYTES = 60 * 2**20
_SOURCES = [
    "harmony_ds",
    "tests",
    "benchmarks",
    "examples",
    "ds_configs",
    "pyproject.toml",
    "README.md",
    "constraints.txt",
]
_LEFT_OUT = ("benchmarks/results/", "benchmarks/vldb22/data/")
_COMPILED_HERE = ["deepspeed"]  # published as source only; no operation of it is compiled before its first use
_WHEELS = """
    accelerate annotated-doc annotated-types click einops greenlet hjson hypothesis iniconfig markdown-it-py mdurl msgpack
    ninja packaging pluggy psutil py-cpuinfo pydantic pydantic-core pygments pytest pytest-timeout rich safetensors
    shellingham sortedcontainers tqdm typer typing-extensions typing-inspection
""".split()
_WELCOME = ["roundpipe", "torchao", "liger-kernel", "beartype"]  # where they can be had; RoundPipe imports the last
_PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"]


def main() -> int:
    """Return the exit status: 1 if the folder is too large."""
    options = _options()
    folder: Path = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    _copy_sources(folder / "source")
    (folder / "source" / "COMMIT").write_text(_commit() + "\n")
    _collect_wheels(folder / "wheels", options.python_version)
    _write_text(folder / "text")
    shutil.copy(Path(__file__).with_name("run.sh"), folder)
    shutil.copy(Path(__file__).with_name("README.md"), folder)
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {nbytes / 2**20:.1f} MiB, {len(list((folder / 'wheels').iterdir()))} wheels")
    if nbytes > LIMIT_BYTES:
        print(f"error: more than {LIMIT_BYTES / 2**20:.0f} MiB", file=sys.stderr)
        return 1
    return 0


def _copy_sources(folder: Path) -> None:
    """Copy the files that git knows, and none that a run or an editor has left."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_SOURCES],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if name.startswith(_LEFT_OUT) or not (ROOT / name).is_file():
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def _commit() -> str:
    """Return the commit of the sources, and whether they differ from it: "1a2b3c4d of 2026-11-30, changed"."""
    described = _git("log", "-1", "--format=%h of %cs")
    return f"{described}, changed" if _git("status", "--porcelain", "--", *_SOURCES) else described


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _collect_wheels(folder: Path, python_version: str) -> None:
    constraints = ["-c", str(ROOT / "constraints.txt")]
    for name in _COMPILED_HERE:
        _pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), *constraints, name)
    wanted = [option for platform in _PLATFORMS for option in ("--platform", platform)]
    wanted += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python_version]
    _pip("download", "--no-deps", *wanted, "-d", str(folder), *constraints, *_WHEELS)
    for name in _WELCOME:
        try:
            _pip("download", "--no-deps", *wanted, "-d", str(folder), name)
        except subprocess.CalledProcessError:
            print(f"{name} has no wheel for Python {python_version}: left out")


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def _write_text(folder: Path) -> None:
    from data import wikipedia_dump

    folder.mkdir()
    shutil.copy(wikipedia_dump(), folder / "wikipedia.xml.bz2")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "gpu-kit")
    parser.add_argument("--python-version", default="3.12", help="of the machine with the GPU (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
