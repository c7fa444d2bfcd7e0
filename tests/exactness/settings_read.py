"""Settings of a program, as cases_reads changes and reads them."""

from __future__ import annotations

SCALE = 1.0


class Settings:
    """Read as an attribute of the class."""

    scale = 1.0

    @classmethod
    def doubled(cls) -> float:
        return 2 * cls.scale


def scale() -> float:
    """The global as another module's function reads it."""
    return SCALE
