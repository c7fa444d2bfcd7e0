"""A model's parameters while an engine trains it: links to their masters, optimizer state and gradients.

They are `EngineParameter`s: plain parameters whose every use passes a gate, which waits for pending updates. Before a
step's first call, masters take over what was written into their weights.
"""

from harmony_ds.parameters.engine_parameter import EngineParameter, ParameterLinks, gate

__all__ = ["EngineParameter", "ParameterLinks", "gate"]
