"""Layers of any `nn.Module`: the repeated blocks, and every other module that owns parameters directly.

A module enters; `Layer`s leave in registration order, since the order of calls is only known after a forward pass. No
architecture is named here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from harmony_ds.decomposer.graph import LayerGraph, LayerSpec, ParameterSpec
from harmony_ds.errors import ConfigError, ModelError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One module whose call is run with device copies of its parameters.

    Attributes:
        index: its number in registration order.
        name: its qualified name in the model ("" for the model itself).
        parameters: the canonical names of its parameters, its own and its descendants', each once.
    """

    index: int
    name: str
    module: nn.Module
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Decomposition:
    """All layers of a model, and the parameters that no layer covers."""

    layers: tuple[Layer, ...]
    unlayered: tuple[str, ...]
    canonical: dict[int, str]
    """`id(parameter)` to canonical name, for every parameter of the model."""


@dataclass(frozen=True, slots=True)
class Room:
    """Device memory for layers, and what a layer takes of it while its gradients are computed.

    Attributes:
        budget_bytes: of the device.
        weight_bytes, gradient_bytes: of one number, there.
    """

    budget_bytes: int
    weight_bytes: int
    gradient_bytes: int

    def holds(self, module: nn.Module) -> bool:
        """Return whether weights and gradients of `module` take at most half, so that another layer can be swapped in."""
        nbytes = 0
        for parameter in module.parameters():
            nbytes += parameter.numel() * (self.weight_bytes + self.gradient_bytes * parameter.requires_grad)
        return 2 * nbytes <= self.budget_bytes


def find_layers(model: nn.Module, patterns: tuple[str, ...] = (), room: Room | None = None) -> Decomposition:
    """Decompose `model`.

    Args:
        model: any module.
        patterns: shell patterns over qualified module names ("model.layers.*") of the blocks. By default, blocks are the
            top-most gradient-checkpointing layers of transformers, else the elements of the outermost `ModuleList`s and
            `Sequential`s. A pattern's star matches points, too; of nested matches the outermost is the block.
        room: on the device; elements that are too large for it are replaced by those of the lists inside them.

    Raises:
        ConfigError: a pattern matches no module.
        ModelError: the model has no parameter, or contains a TorchScript module.
    """
    _refuse_torchscript(model)
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    if not canonical:
        raise ModelError(f"{type(model).__name__} has no parameters: there is nothing to train.")
    blocks = _matching(model, patterns) if patterns else _repeated_blocks(model, room)
    layers: list[Layer] = []
    unlayered: list[str] = []
    seen: set[nn.Module] = set()  # a model may hold one module in several places
    for name, module, bare in _walk(model, "", blocks):
        if module in seen:
            continue
        seen.add(module)
        parameters = module._parameters.values() if bare else module.parameters()
        names = tuple(dict.fromkeys(canonical[id(p)] for p in parameters if p is not None))
        if bare:
            unlayered.extend(names)
        elif names:
            layers.append(Layer(len(layers), name, module, names))
    return Decomposition(tuple(layers), tuple(dict.fromkeys(unlayered)), canonical)


def _refuse_torchscript(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{name or type(model).__name__} is a TorchScript module (torch.jit.script, torch.jit.trace), which runs "
                "on parameters of its own that cannot be exchanged: initialize with the module that it was made of. "
                "Functions of TorchScript and torch.compile(module) can be used inside a model."
            )


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> set[nn.Module]:
    blocks: set[nn.Module] = set()
    names = [(name, module) for name, module in model.named_modules() if name]
    for pattern in patterns:
        matches = [(name, module) for name, module in names if fnmatchcase(name, pattern)]
        if not matches:
            raise ConfigError(f'harmony.layers: the pattern "{pattern}" matches no module of {type(model).__name__}.')
        found = {module for _, module in matches if not isinstance(module, _CONTAINERS)}
        inside = {inner for module in found for inner in module.modules()}
        for name, module in matches:
            # A list inside a match is part of it, and one of which elements match stands for these.
            if module not in inside and inside.isdisjoint(module.modules()):
                raise ConfigError(
                    f'harmony.layers: the pattern "{pattern}" matches {name}, a list that is never called itself: name its '
                    f'elements, such as "{name}.*".'
                )
        blocks |= found
    return _topmost(blocks)


def _topmost(modules: set[nn.Module]) -> set[nn.Module]:
    nested = {inner for module in modules for inner in module.modules() if inner is not module}
    return modules - nested


def _repeated_blocks(model: nn.Module, room: Room | None) -> set[nn.Module]:
    checkpointing = {m for m in model.modules() if _is_checkpointing_layer(m)}
    blocks = _topmost(checkpointing)
    covered = {inner for block in blocks for inner in block.modules()}
    elements = set(_outermost_elements(nn.ModuleList([model]), covered))
    if room is not None:
        elements = _cut_to_fit(elements, room)
    return blocks | elements


def _cut_to_fit(elements: set[nn.Module], room: Room) -> set[nn.Module]:
    """Replace each element that `room` does not hold by the elements of its own outermost lists, if it has some."""
    fitting: set[nn.Module] = set()
    for element in elements:
        inner: set[nn.Module] = set()
        if not room.holds(element):
            inner = set(_outermost_elements(nn.ModuleList([element]), set()))
        fitting |= _cut_to_fit(inner, room) if inner else {element}
    return fitting


def _is_checkpointing_layer(module: nn.Module) -> bool:
    # By name: importing transformers takes seconds, and a model that is not from there does not need it.
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _outermost_elements(module: nn.Module, covered: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the elements of the outermost lists below `module` that contain no block found already."""
    for child in module.children():
        if child in covered:
            continue
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential)) and not any(m in covered for m in child.modules())
        for element in child.children() if is_list else ():
            if isinstance(element, _CONTAINERS):
                yield from _outermost_elements(nn.ModuleList([element]), covered)
            elif any(True for _ in element.parameters()):
                yield element
        if not is_list:
            yield from _outermost_elements(child, covered)


def _walk(module: nn.Module, name: str, blocks: set[nn.Module]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (name, module, bare): layers, and containers whose own parameters (`bare`) no call covers."""
    if module in blocks:
        yield name, module, False
        return
    owns = any(p is not None for p in module._parameters.values())
    if owns:
        is_layer = not isinstance(module, _CONTAINERS) and not any(inner in blocks for inner in module.modules())
        yield name, module, not is_layer
        if is_layer:
            return
    for child_name, child in module.named_children():
        yield from _walk(child, f"{name}.{child_name}" if name else child_name, blocks)


def layer_graph(decomposition: Decomposition, parameters: dict[str, nn.Parameter]) -> LayerGraph:
    """Return the graph of a model whose call order is not known yet."""
    return LayerGraph(
        tuple(LayerSpec(layer.index, layer.name, layer.parameters) for layer in decomposition.layers),
        tuple(ParameterSpec(name, tuple(p.shape), p.requires_grad) for name, p in parameters.items()),
        (),
        decomposition.unlayered,
    )
