"""The costs of layers: `CostTable`, measured by `harmony_ds.measuring.measure`."""

from harmony_ds.profiler.costs import CallCost, CostTable

__all__ = ["CallCost", "CostTable"]
