"""What a model's parameters know of their engine: masters, optimizer state, and what changing them by hand entails.

While an engine has a model, its parameters are `EngineParameter`s: plain parameters whose every use passes a gate, which
waits for pending updates. Before a step's first call, masters follow what was written into their weights.
"""

from harmony_ds.parameters.engine_parameter import EngineParameter, ParameterLinks

__all__ = ["EngineParameter", "ParameterLinks"]
