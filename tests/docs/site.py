"""What mkdocs does not find itself: pages outside docs/, pages made from the code, and links to the public names.

mkdocs.yml names this file as its hook. Pages keep their paths from the repository's root, so that links between them hold
here as they do on GitHub.
"""

from __future__ import annotations

import re
from typing import Any

from mkdocs.structure.files import File, Files

import harmony_ds
from tests.docs import config_tables, house
from tests.docs.pages import DOCUMENTS, EXAMPLES, FURTHER, ROOT

ANSWERS = ROOT / "outputs" / "answers.md"
TRAINERS = ("HarmonyMixin", "HarmonyTrainer")
_TRANSFORMERS = "harmony_ds.integrations.transformers"
_CODE = re.compile(
    r"^```.*?^```$|(?<!\[)`(?:harmony_ds\.|(?P<engine>engine\.))?(?P<name>\w+)(?:\([^`]*\))?`", re.M | re.S
)


def on_files(files: Files, config: Any) -> Files:
    """Return all files of the site, by their paths from the repository's root."""
    pages = [*DOCUMENTS, *EXAMPLES, *FURTHER]
    images = (ROOT / "docs" / "images").rglob("*.png")
    found = [
        File(str(file.relative_to(ROOT)), str(ROOT), config.site_dir, config.use_directory_urls)
        for file in [*pages, *images]
    ]
    made = [File.generated(config, path, content=text) for path, text in generated().items()]
    return Files([*found, *made, *(file for file in files if not file.src_uri.endswith((".md", ".png")))])


def generated() -> dict[str, str]:
    """Return the pages that are made from the code, by path."""
    names = [name for name in harmony_ds.__all__ if name not in ("__version__", "HarmonyEngine")]
    return {
        "docs/files.md": house.page(),
        "docs/keys.md": config_tables.all_keys(),
        "docs/answers.md": ANSWERS.read_text(encoding="utf-8") if ANSWERS.exists() else _without_answers(),
        "docs/api/harmony_ds.md": reference("harmony_ds", [f"harmony_ds.{name}" for name in names]),
        "docs/api/engine.md": reference("HarmonyEngine", ["harmony_ds.HarmonyEngine"]),
        "docs/api/trainer.md": reference("For the Trainer", [f"{_TRANSFORMERS}.{name}" for name in TRAINERS]),
    }


def _without_answers() -> str:
    return (
        f"# All answers\n\n`python -m tests.compatibility.run {ANSWERS.relative_to(ROOT)}` writes them, in minutes.\n"
    )


def reference(title: str, names: list[str]) -> str:
    """Return a page that mkdocstrings fills with the docstrings of `names`."""
    return "\n\n".join([f"# {title}", *(f"::: {name}" for name in sorted(names, key=str.lower))])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with public names in backticks as links to their docstrings."""
    return markdown if page.file.src_uri.startswith("docs/api/") else _CODE.sub(_linked, markdown)


def _linked(found: re.Match[str]) -> str:
    name = found["name"]
    if found["engine"] and name in methods():
        return f"[{found[0]}][harmony_ds.HarmonyEngine.{name}]"
    if not found["engine"] and name in harmony_ds.__all__:
        return f"[{found[0]}][harmony_ds.{name}]"
    if name in TRAINERS:
        return f"[{found[0]}][{_TRANSFORMERS}.{name}]"
    return found[0]


def methods() -> set[str]:
    """Return the names of the engine's methods and properties, which all have a docstring; not those of their aliases."""
    members = vars(harmony_ds.HarmonyEngine).items()
    public = {name: member for name, member in members if not name.startswith("_")}
    return {name for name, it in public.items() if isinstance(it, property) or getattr(it, "__name__", "") == name}
