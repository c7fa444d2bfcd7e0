"""The reference of the public names, from their docstrings, by pdoc: `python -m tests.docs.reference FOLDER`.

Every link in it leads somewhere, and every public name has its place.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import harmony_ds

_SCRIPT = re.compile(r"<script.*?</script>", re.DOTALL)
ROOMS = ("harmony_ds", "harmony_ds.integrations.transformers")


def main(folder: Path) -> None:
    """Write the reference; it changes the package, so it needs a process of its own.

    Raises:
        AssertionError: a public name is missing, or a link leads nowhere.
    """
    import pdoc

    # pdoc reads what a module and a class hold themselves; ours are loaded when asked for, and made of parts.
    vars(harmony_ds).update({name: getattr(harmony_ds, name) for name in harmony_ds.__all__})
    give_inherited(harmony_ds.HarmonyEngine)
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*ROOMS, output_directory=folder)
    check(folder)


def give_inherited(kind: type) -> None:
    """Copy the public members of our base classes to `kind`."""
    for base in kind.__mro__[1:]:
        if base.__module__.startswith("harmony_ds"):
            for name, member in vars(base).items():
                if not name.startswith("_") and name not in vars(kind):
                    setattr(kind, name, member)


def check(folder: Path) -> None:
    """Check every public name and every link."""
    pages = {page.resolve(): _SCRIPT.sub("", page.read_text(encoding="utf-8")) for page in folder.rglob("*.html")}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    there = anchors[(folder / "harmony_ds.html").resolve()]
    wanted = {
        *harmony_ds.__all__,
        *(f"HarmonyEngine.{name}" for name in vars(harmony_ds.HarmonyEngine) if name[0] != "_"),
    }
    missing = wanted - there - {"__version__", "utils", "zero"}
    assert not missing, f"not in the reference: {sorted(missing)}"
    for page, text in pages.items():
        for path, anchor in re.findall(r'\bhref="(?!https?:|data:)([^"#]*)(?:#([^"]*))?"', text):
            to = (page.parent / path).resolve() if path else page
            assert to in anchors, f"{page.name} links to {path}"
            assert not anchor or anchor in anchors[to], f"{page.name} links to {path}#{anchor}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print(f"written: {sys.argv[1]}/index.html")
