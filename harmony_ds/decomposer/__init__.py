"""Decomposition of any `nn.Module` into layers."""

from harmony_ds.decomposer.find import Decomposition, find_layers
from harmony_ds.decomposer.graph import LayerGraph, LayerSpec, ParameterSpec

__all__ = ["Decomposition", "LayerGraph", "LayerSpec", "ParameterSpec", "find_layers"]
