"""Find the layers of any `nn.Module`: its repeated blocks, and every other module that owns parameters directly. A layer
that peft has put adapters beside is one with them. Embeddings and their norms are one layer with the module that adds
them up: the sums of all rows are not held one beside the other then, since a layer may take a few rows at a time.

`find_layers` takes a model and returns its `Layer`s in registration order, since the order of their calls is only known
after a forward pass. No architecture is named here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from harmony_ds.decomposer.graph import LayerGraph, LayerSpec, ParameterSpec
from harmony_ds.errors import ConfigError, ModelError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A module whose calls run with copies of its parameters on the device: the smallest unit that is swapped.

    Attributes:
        index: its number in registration order.
        name: its qualified name in the model ("" for the model itself).
        parameters: the canonical names of its parameters, its own and its descendants', each once; and of its buffers that
            travel with them.
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
    """Device memory for layers, and how much of it a layer takes while its gradients are computed.

    Attributes:
        budget_bytes: device memory that may be used.
        weight_bytes, gradient_bytes: device bytes of one weight, and of one gradient element.
        stored_bytes: of packed parameters, by the parameter's id.
    """

    budget_bytes: int
    weight_bytes: int
    gradient_bytes: int
    stored_bytes: Mapping[int, int] = field(default_factory=dict)

    def holds(self, module: nn.Module) -> bool:
        """Return whether weights and gradients of `module` take at most half, so that another layer can be swapped in."""
        return 2 * self.taken_by(module) <= self.budget_bytes

    def taken_by(self, module: nn.Module) -> int:
        """Return the bytes of weights and gradients of `module`."""
        nbytes = 0
        for parameter in module.parameters():
            stored = self.stored_bytes.get(id(parameter))
            nbytes += parameter.numel() * self.weight_bytes if stored is None else stored
            nbytes += parameter.numel() * self.gradient_bytes * parameter.requires_grad
        return nbytes


def find_layers(model: nn.Module, patterns: tuple[str, ...] = (), room: Room | None = None) -> Decomposition:
    """Return the layers of `model`, and the parameters that belong to none.

    Args:
        model: any module.
        patterns: shell patterns over qualified module names ("model.layers.*") of the blocks. By default, blocks are the
            top-most gradient-checkpointing layers of transformers, else the elements of the outermost `ModuleList`s and
            `Sequential`s. A pattern's star matches points, too; of nested matches the outermost is the block.
        room: of the device; a block of a list that is too large for it is replaced by the elements of the lists inside it.

    Raises:
        ConfigError: a pattern matches no module.
        ModelError: the model has no parameter, or contains a TorchScript module.
    """
    _refuse_torchscript(model)
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    if not canonical:
        raise ModelError(f"{type(model).__name__} has no parameters: there is nothing to train.")
    blocks = _matching(model, patterns) if patterns else _repeated_blocks(model, room)
    embeddings = {m for m in model.modules() if _adds_embeddings(m) and (room is None or room.holds(m))}
    layers: list[Layer] = []
    unlayered: list[str] = []
    seen: set[nn.Module] = set()  # a model may hold one module in several places
    for owner in _parameter_owners(model, "", blocks, embeddings):
        if owner.module in seen:
            continue
        seen.add(owner.module)
        if owner.is_layer:
            names = _canonical_names(owner.module.parameters(), canonical)
            if names:
                layers.append(Layer(len(layers), owner.name, owner.module, names))
        else:
            unlayered.extend(_canonical_names(owner.module._parameters.values(), canonical))
    return Decomposition(tuple(layers), tuple(dict.fromkeys(unlayered)), canonical)


def _canonical_names(parameters: Iterable[nn.Parameter | None], canonical: dict[int, str]) -> tuple[str, ...]:
    """Return the canonical names of `parameters`, each once."""
    return tuple(dict.fromkeys(canonical[id(parameter)] for parameter in parameters if parameter is not None))


def _refuse_torchscript(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{name or type(model).__name__} is a TorchScript module (torch.jit.script, torch.jit.trace), which runs "
                "on parameters of its own that cannot be exchanged: initialize with the module that it was made of. "
                "Functions of TorchScript and torch.compile(module) can be used inside a model."
            )


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> set[nn.Module]:
    """Return the outermost modules whose qualified names match a pattern; refuse a pattern that is of no use."""
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
    """Return the modules that are inside no other one of them."""
    nested = {inner for module in modules for inner in module.modules() if inner is not module}
    return modules - nested


def _repeated_blocks(model: nn.Module, room: Room | None) -> set[nn.Module]:
    """Return the outermost checkpointing layers of transformers, and the elements of the outermost lists without one."""
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


def _is_adapted_layer(module: nn.Module) -> bool:
    """Return whether `module` is one of peft: a layer, and adapters beside it whose outputs are added to its own."""
    return any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__)


def _adds_embeddings(module: nn.Module) -> bool:
    """Return whether `module` has a forward, and consists of embeddings and norms, as a BERT's embeddings do."""
    if type(module).forward is nn.Module.forward:  # other modules call its parts
        return False
    parts = [child for child in module.children() if any(True for _ in child.parameters())]
    embeddings = [part for part in parts if isinstance(part, nn.Embedding)]
    others = [part for part in parts if not isinstance(part, nn.Embedding)]
    return bool(embeddings and others) and all(map(_is_norm, others))


def _is_norm(module: nn.Module) -> bool:
    """Return whether all parameters of `module` are vectors, such as those of a LayerNorm."""
    return all(parameter.dim() == 1 for parameter in module.parameters())


def _outermost_elements(module: nn.Module, covered: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the elements of the outermost lists below `module` that contain no block found already."""
    for child in module.children():
        if child in covered:
            continue
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential)) and not any(m in covered for m in child.modules())
        if not is_list:
            yield from _outermost_elements(child, covered)
            continue
        for element in child.children():
            if isinstance(element, _CONTAINERS):
                yield from _outermost_elements(nn.ModuleList([element]), covered)
            elif any(True for _ in element.parameters()):
                yield element


@dataclass(frozen=True, slots=True, eq=False)
class _ParameterOwner:
    """A module with parameters, as `_parameter_owners` finds it.

    Attributes:
        name: its qualified name in the model.
        is_layer: True: a layer, which covers its descendants' parameters, too. False: a module that is no layer (a list, or
            one with blocks inside), and whose own parameters no layer's call covers.
    """

    name: str
    module: nn.Module
    is_layer: bool


def _parameter_owners(
    module: nn.Module, name: str, blocks: set[nn.Module], embeddings: set[nn.Module]
) -> Iterator[_ParameterOwner]:
    """Yield the modules at or below `module` that have parameters, in registration order, nothing inside a layer.

    Args:
        embeddings: modules that may be layers, though all their parameters are those of modules inside them.
    """
    if module in blocks:
        yield _ParameterOwner(name, module, is_layer=True)
        return
    owns = any(parameter is not None for parameter in module._parameters.values())
    if owns or module in embeddings or _is_adapted_layer(module):
        is_layer = not isinstance(module, _CONTAINERS) and not any(inner in blocks for inner in module.modules())
        yield _ParameterOwner(name, module, is_layer)
        if is_layer:
            return
    for child_name, child in module.named_children():
        yield from _parameter_owners(child, f"{name}.{child_name}" if name else child_name, blocks, embeddings)


def add_buffers(decomposition: Decomposition, owners: Mapping[str, nn.Module]) -> Decomposition:
    """Return the decomposition with buffers that travel as parameters do, among those of each layer that holds them.

    Args:
        owners: the buffers' modules, by the names of the buffers.
    """
    layers: list[Layer] = []
    for layer in decomposition.layers:
        inside = set(layer.module.modules())
        own = tuple(name for name, module in owners.items() if module in inside)
        layers.append(replace(layer, parameters=(*layer.parameters, *own)))
    return replace(decomposition, layers=tuple(layers))


def layer_graph(
    decomposition: Decomposition, parameters: dict[str, nn.Parameter], stored_bytes: Mapping[str, int]
) -> LayerGraph:
    """Return the layer graph of a decomposed model; its `calls` are empty, since no forward pass has run yet.

    Args:
        stored_bytes: of packed parameters, and of buffers that travel with them, by name.
    """
    specs: list[ParameterSpec] = []
    for name, parameter in parameters.items():
        stored = stored_bytes.get(name)
        specs.append(ParameterSpec(name, tuple(parameter.shape), parameter.requires_grad, stored_bytes=stored))
    for name, stored in stored_bytes.items():
        if name not in parameters:
            specs.append(ParameterSpec(name, (stored,), trainable=False, stored_bytes=stored))
    return LayerGraph(
        tuple(LayerSpec(layer.index, layer.name, layer.parameters) for layer in decomposition.layers),
        tuple(specs),
        (),
        decomposition.unlayered,
    )
