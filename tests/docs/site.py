"""The built site: `python -m tests.docs.site FOLDER [--quick]`, which `make docs` runs.

All pages as HTML, those that are generated from the code among them (every file, every key of a ds_config, every answer
that DeepSpeed and harmony_ds give), and the reference of the public names. `--quick` leaves out the answers, which take
minutes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import markdown2

from tests.docs import config_tables, house
from tests.docs.pages import DOCUMENTS, EXAMPLES, ROOT

FURTHER = ("CONTRIBUTING.md", "CHANGELOG.md", "ds_configs/README.md", "tests/exactness/outcomes.md")
PAGES = [*DOCUMENTS, *EXAMPLES, *ROOT.glob("benchmarks/*/README.md"), *(ROOT / name for name in FURTHER)]
_STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
pre, code { font: 13px/1.4 ui-monospace, monospace; background: #f5f5f3 } pre { padding: .8rem; overflow-x: auto }
table { border-collapse: collapse } td, th { border: 1px solid #ccc; padding: .25rem .6rem; text-align: left }
img { max-width: 100% }"""


def build(folder: Path, quick: bool = False) -> None:
    """Write the site into `folder`."""
    for page in PAGES:
        _write(folder / page.relative_to(ROOT).with_suffix(".html"), page.read_text(encoding="utf-8"))
    shutil.copytree(ROOT / "docs" / "images", folder / "docs" / "images", dirs_exist_ok=True)
    _write(folder / "docs" / "files.html", house.page())
    _write(folder / "docs" / "keys.html", config_tables.all_keys())
    if not quick:
        answers = folder / "answers.md"
        subprocess.run([sys.executable, "-m", "tests.compatibility.run", str(answers)], cwd=ROOT, check=True)
        _write(folder / "docs" / "answers.html", answers.read_text(encoding="utf-8"))
    subprocess.run([sys.executable, "-m", "tests.docs.reference", str(folder / "api")], cwd=ROOT, check=True)


def _write(file: Path, text: str) -> None:
    """Write a page as HTML; links between pages follow."""
    html = markdown2.markdown(text, extras=["code-friendly", "fenced-code-blocks", "tables", "header-ids"])
    html = re.sub(r'href="(?!https?:)([^"#]*)\.md(#[^"]*)?"', r'href="\1.html\2"', html)
    file.parent.mkdir(parents=True, exist_ok=True)
    head = f'<!doctype html><meta charset="utf-8"><title>{file.stem}</title><style>{_STYLE}</style>'
    file.write_text(f"{head}\n{html}", encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]), quick="--quick" in sys.argv)
    print(f"written: {sys.argv[1]}/docs/index.html")
