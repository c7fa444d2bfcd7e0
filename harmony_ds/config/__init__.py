"""The ds_config: what it says, checked, as frozen data."""

from harmony_ds.config.harmony import HarmonySettings
from harmony_ds.config.load import dtype_of_checkpoint, for_loaded_model, load_config, trained_dtypes
from harmony_ds.config.settings import Config, Section

__all__ = [
    "Config",
    "HarmonySettings",
    "Section",
    "dtype_of_checkpoint",
    "for_loaded_model",
    "load_config",
    "trained_dtypes",
]
