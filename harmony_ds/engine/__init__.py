"""The DeepSpeed face of harmony_ds: `initialize` and the engine that it returns."""

from harmony_ds.engine.core import HarmonyEngine
from harmony_ds.engine.start import initialize

__all__ = ["HarmonyEngine", "initialize"]
