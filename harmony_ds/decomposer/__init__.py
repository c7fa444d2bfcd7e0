"""Decomposition of any `nn.Module` into layers."""

from harmony_ds.decomposer.find import Decomposition, Layer, find_layers
from harmony_ds.decomposer.graph import LayerGraph, LayerSpec, ParameterSpec, merge_calls, positions_of

__all__ = [
    "Decomposition",
    "Layer",
    "LayerGraph",
    "LayerSpec",
    "ParameterSpec",
    "find_layers",
    "merge_calls",
    "positions_of",
]
