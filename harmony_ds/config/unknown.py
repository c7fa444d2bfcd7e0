"""What is said about a key that nobody knows."""

from __future__ import annotations

import difflib


def unknown_key(key: str, where: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else f" Known keys: {', '.join(sorted(known))}."
    return f'unknown key "{key}" in {where}.{hint}'
