"""Calls of modules inside a layer, run a tile of tokens at a time: the layer needs the working memory of one tile for each.

    whole      input -> gate, up, activation, product of 32,768 tokens (the graph keeps them all) -> output
    in tiles   input -> the same of 4,096 tokens, dropped again, eight times                      -> output

A tiled call is one node of the layer's graph, which keeps its inputs alone. Its backward pass runs each tile again and
propagates through it at once; gradients of parameters are added up after each tile, in the accumulation dtype. The same
tiles run in both passes, with a graph in both (whether one is built decides which kernels run), so that a recomputation
gives the same bits, whatever the packs are.

Which calls can be cut is proved for their very shapes (`token_proof`), the outermost module first; none is known by its
name or class. Where a proof fails, the module runs as it is, and modules inside of it are tried. What keeps little beside
its inputs and outputs (a projection) is not worth cutting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from harmony_ds.device.base import PartsToRun
from harmony_ds.device.live_bytes import EagerDispatchMode
from harmony_ds.model.graph_cut import ANCHOR, cut, is_of_autograd_function, propagate, reachable_nodes
from harmony_ds.model.intercept import Autocast, ContextFactory
from harmony_ds.model.own_settings import NOT_PLAIN, SCALARS
from harmony_ds.model.patching import Item
from harmony_ds.model.targets import GradientSum
from harmony_ds.model.token_proof import Forward, ModuleCall, TokenProof, is_watched, prove
from harmony_ds.model.token_rules import TokensMixedError
from harmony_ds.model.trees import flatten_all, unflatten_all

_WORTH = 0.25
"""A call is cut if its graph keeps more than this share of the bytes of its inputs beside inputs and outputs."""
_LIGHT = 8
"""A call whose graph keeps less than so many times the bytes of its inputs takes more tokens at a time, as many as keep no
more than that: each tile takes time of its own, and a norm's need not be smaller than an MLP's."""
_NONE_UNREAD = -1


@dataclass(frozen=True, slots=True, eq=False)
class TiledCall:
    """How a call is cut: into tiles of `lengths` tokens, and what its proof says of it."""

    proof: TokenProof
    lengths: tuple[int, ...]


@dataclass(slots=True, eq=False)
class LayerRun:
    """One run of a layer whose inner calls may run in tiles.

    Attributes:
        restoring: makes the context in which a part of the layer can run again in the backward pass.
        is_hooked: whether the program's hooks wait for gradients of a module's parameters, and must see them whole.
        skipped: number of the tiled call whose output need not be computed; -1: there is none.
        count: of tiled calls so far.
    """

    restoring: ContextFactory
    is_hooked: Callable[[nn.Module], bool]
    skipped: int = _NONE_UNREAD
    count: int = 0


class LayerTiles:
    """Which calls inside layers run in tiles, and what is known of them. One for each engine.

    Attributes:
        size: the most tokens of a tile, those of all rows together, of a call whose graph keeps much (`_LIGHT`); 0: nothing
            is cut.
        unread: number of the tiled call, in the next run of a layer, whose output need not be computed; -1: there is none.
    """

    def __init__(self, parts_to_run: PartsToRun) -> None:
        self.size = 0
        self.parts_to_run = parts_to_run
        self.unread = _NONE_UNREAD
        self._known: dict[object, TiledCall | None] = {}  # None: it runs whole
        self._refused: dict[tuple[nn.Module, bool], str] = {}  # also by whether it trains; all calls of these run whole
        self._tiled: set[tuple[nn.Module, bool]] = set()  # modules of which some calls run in tiles
        self._held: dict[int, object] = {}  # by whose ids calls are known
        self._inside = False  # a tile, or a proof, runs
        self._gather: Callable[[], None] = _nothing
        self._watch: _Watch | None = None

    @property
    def cut(self) -> list[TiledCall]:
        """The kinds of calls that have been cut."""
        return [tiled for tiled in self._known.values() if tiled is not None]

    @property
    def refused(self) -> dict[str, str]:
        """Why modules run whole, by class: for people who ask."""
        return {type(module).__name__: reason for (module, _), reason in self._refused.items()}

    # ---- around a run of a layer

    def items(self, layer: nn.Module, run: LayerRun) -> list[Item]:
        """Return what is to be patched so that modules inside `layer` run in tiles; its `run` begins."""
        run.skipped, self.unread = self.unread, _NONE_UNREAD
        inside = [module for module in layer.modules() if module is not layer]
        return [(vars(module), "forward", _TiledForward(module, module.forward, self, run)) for module in inside]

    def wrapped(self, layer: nn.Module, forward: Forward, run: LayerRun) -> Forward:
        """Return the layer's own `forward`, to run in tiles itself if its tokens are independent."""
        return _TiledForward(layer, forward, self, run)

    @contextmanager
    def gathering(self, gather: Callable[[], None]) -> Iterator[None]:
        """Call `gather` after each tile of backward passes while open: it adds up gradients that are on parameters."""
        before, self._gather = self._gather, gather
        try:
            yield
        finally:
            self._gather = before

    @contextmanager
    def finding_unread(self, layer: nn.Module) -> Iterator[_Watch]:
        """Find out whether the output of the last tiled call of a run of `layer` is read in its backward pass."""
        watch = self._watch = _Watch(layer)
        try:
            with torch.autograd.graph.saved_tensors_hooks(*watch.hooks), watch:
                yield watch
        finally:
            self._watch = None

    # ---- a call

    def call(self, module: nn.Module, own: Forward, run: LayerRun, args: Any, kwargs: Any) -> Any:
        """Return the result of a call of `module`, whose forward is `own`: in tiles, if that can be and is of use."""
        if self._inside or (module, module.training) in self._refused:
            return own(*args, **kwargs)
        call = ModuleCall.taken_apart(module, own, args, kwargs)
        tiled = self._find(call)
        if tiled is None or is_watched(module) or run.is_hooked(module):
            return own(*args, **kwargs)
        number = run.count
        run.count += 1
        work = _Work(call, tiled, self, run.restoring, number == run.skipped)
        if self._watch is None:
            return work.run()
        with self._watch.paused():
            result = work.run()
        self._watch.returned(number)
        return result

    def _find(self, call: ModuleCall) -> TiledCall | None:
        """Return how `call` is cut; None: it runs whole."""
        sizes = self._sizes_to_try(call)
        if not sizes:
            return None
        key = self.size, self.key_of(call)
        if key in self._known:
            return self._known[key]
        before, self._inside = self._inside, True
        try:
            tiled, refusal = _prove_in_one(call, sizes)
        finally:
            self._inside = before
        mode = call.module, call.module.training
        if tiled is not None:
            self._known[key] = tiled
            self._tiled.add(mode)
        elif mode in self._tiled:  # a recomputation of its other calls has to run as they did
            self._known[key] = None
        else:
            self._refused[mode] = refusal
        return tiled

    def _sizes_to_try(self, call: ModuleCall) -> dict[int, int]:
        """Return the dimensions that tokens may lie in, the longest first, with the most of each that a tile takes.

        They are those of the call's first tensor, but its last, that are longer than that.
        """
        if not call.tensors or call.tensors[0].dim() < 2:
            return {}
        shape = call.tensors[0].shape
        sizes: dict[int, int] = {}
        for dim in sorted(range(len(shape) - 1), key=lambda one: -shape[one]):
            # Where the batch is first, its rows are in each tile.
            size = max(1, self.size // (shape[0] if dim else 1))
            if shape[dim] > size:
                sizes[dim] = size
        return sizes

    def key_of(self, call: ModuleCall) -> object:
        """Return what decides which operations a call runs: code and settings of its modules, and what it is given."""
        device = call.tensors[0].device.type
        parts: list[object] = [torch.is_grad_enabled(), Autocast.current(device), self._code_key(call.forward)]
        for leaf in call.leaves:
            if isinstance(leaf, Tensor):
                parts.append((leaf.shape, leaf.dtype, leaf.requires_grad, leaf.stride()))
            else:
                parts.append(repr(leaf) if leaf is None or isinstance(leaf, SCALARS) else self._id(leaf))
        for name, module in call.module.named_modules():
            parts += [name, type(module), module.training]
            for key, value in vars(module).items():
                if isinstance(value, SCALARS) or value is None:
                    parts.append((key, value))
                elif key == "forward":
                    parts.append(self._code_key(value))
                elif key not in NOT_PLAIN:
                    parts.append((key, self._id(value)))
            for held in (module._parameters, module._buffers):
                parts += [t if t is None else (t.shape, t.dtype, t.requires_grad) for t in held.values()]
        return tuple(parts)

    def _code_key(self, forward: Any) -> object:
        own = forward.own if isinstance(forward, _TiledForward) else forward
        return self._id(getattr(own, "__func__", own))

    def _id(self, value: object) -> int:
        """Return the id of `value`, which is kept, so that no other gets it."""
        self._held[id(value)] = value
        return id(value)

    # ---- tiles

    @contextmanager
    def running_tile(self, autocast: Autocast | None) -> Iterator[None]:
        """Run a tile while open: nothing inside is cut."""
        before, self._inside = self._inside, True
        try:
            with Autocast.entered(autocast):
                yield
        finally:
            self._inside = before

    def gather(self) -> None:
        """Add up the gradients that a tile has left on parameters."""
        self._gather()


class _TiledForward:
    """Stands for the `forward` of a module inside a layer while the layer runs."""

    def __init__(self, module: nn.Module, own: Forward, tiles: LayerTiles, run: LayerRun) -> None:
        self.own = own
        self._module = module
        self._tiles = tiles
        self._run = run

    @_disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tiles.call(self._module, self.own, self._run, args, kwargs)


def _prove_in_one(call: ModuleCall, sizes: Mapping[int, int]) -> tuple[TiledCall | None, str]:
    """Return how a call is cut along the first of the dimensions in `sizes` where tokens are proved to be independent.

    None, with the reason: it is proved of no dimension, or the call is not worth cutting.
    """
    refusal = ""
    for dim, size in sizes.items():
        tokens = call.tensors[0].shape[dim]
        lengths = _lengths(tokens, size)
        try:
            proof = prove(call, dim, lengths)
            if proof.inner_bytes <= _WORTH * proof.input_bytes:
                return None, "its graph keeps little beside its inputs and outputs"
            times = _LIGHT * proof.input_bytes // proof.inner_bytes
            if times > 1:
                lengths = _lengths(tokens, times * size)
                proof = prove(call, dim, lengths)
        except TokensMixedError as error:
            refusal = refusal or str(error.with_traceback(None))  # whose frames keep the call
            continue
        return TiledCall(proof, lengths), ""
    return None, refusal


def _lengths(count: int, size: int) -> tuple[int, ...]:
    """Return the lengths of the fewest tiles of at most `size` tokens; they differ by one at most."""
    tiles = -(-count // size)
    return tuple(count // tiles + (number < count % tiles) for number in range(tiles))


@dataclass(slots=True, eq=False)
class _Work:
    """One tiled call: what its two passes need to know.

    Attributes:
        skipped: nobody reads the output, which is not computed.
    """

    call: ModuleCall
    tiled: TiledCall
    tiles: LayerTiles
    restoring: ContextFactory
    skipped: bool
    autocast: Autocast | None = field(init=False)

    def run(self) -> Any:
        """Return the result of the call, with a graph if it has one."""
        tensors = self.call.tensors
        self.autocast = Autocast.current(tensors[0].device.type)
        outputs = self.tiled.proof.outputs
        if torch.is_grad_enabled() and any(output.requires_grad for output in outputs):
            made: Sequence[Tensor] = _Tiled.apply(ANCHOR, self, *tensors)  # type: ignore[no-untyped-call]
        else:
            made = self.forward(tensors)
        self.call = self.call.without_tensors()  # which the graph saves
        own = iter(made)
        leaves = [output.value if output.place is None else next(own) for output in outputs]
        return unflatten_all(leaves, self.tiled.proof.structure)[0]

    def tiles_of(self, tensors: Sequence[Tensor], has_graph: bool) -> Iterator[_Tile]:
        """Yield the tiles of a pass over `tensors`, the first tokens first; `has_graph`: with gradients on."""
        trained = [has_graph and tensor.requires_grad for tensor in tensors]
        lengths = self.tiled.lengths
        firsts = [0, *accumulate(lengths)]
        for number in self.tiles.parts_to_run(lengths):
            first, length = firsts[number], lengths[number]
            inputs: list[Tensor] = []
            for tensor, place in zip(tensors, self.tiled.proof.places, strict=True):
                part = tensor.detach()
                if place is not None:
                    part = place.narrow(part, first, length)
                    part = part.contiguous() if tensor.is_contiguous() else part
                inputs.append(part)
            yield _Tile.beginning_at(first, length, inputs, trained)

    def outputs_of(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run one tile, with a graph if gradients are on; return the tensors of its result."""
        with self.tiles.running_tile(self.autocast):
            leaves, _ = flatten_all((self.call.run(inputs),))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of the result, without a graph."""
        known = [output for output in self.tiled.proof.outputs if output.place is not None]
        if self.skipped:  # zeros, which anything can go on with
            return [torch.zeros(output.shape, dtype=output.dtype, device=tensors[0].device) for output in known]
        whole = [torch.empty(output.shape, dtype=output.dtype, device=tensors[0].device) for output in known]
        for tile in self.tiles_of(tensors, has_graph=torch.is_grad_enabled()):
            made = self.outputs_of(tile.inputs)
            for target, output, part in zip(whole, known, made, strict=True):
                assert output.place is not None
                of_tile = output.place.narrow(part.detach(), 0, tile.length)
                output.place.narrow(target, tile.first, tile.length).copy_(of_tile)
            del tile, made, part
        return whole

    def backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Propagate `gradients` of the result tile by tile; return those of `tensors`. Those of parameters are gathered."""
        known = [output.place for output in self.tiled.proof.outputs if output.place is not None]
        sums: list[Tensor | None] = [None] * len(tensors)
        for tile in self.tiles_of(tensors, has_graph=True):
            with self.restoring(), torch.enable_grad():
                made = self.outputs_of(tile.inputs)
            edges, arrived = [], []
            for place, part, gradient in zip(known, made, gradients, strict=True):
                if gradient is not None and part.requires_grad:
                    edges.append(get_gradient_edge(part))
                    arrived.append(place.narrow(gradient, tile.first, tile.length).reshape(part.shape))
            tile.inputs.clear()
            del made, part  # autograd frees what it does not need any more on its way
            propagate(edges, arrived)
            del edges, arrived
            self.tiles.gather()
            for number, target in enumerate(tile.targets):
                own = None if target is None else target.pop()
                if own is not None:
                    sums[number] = self._added(sums[number], tensors[number], number, own, tile)
                del own
        return sums

    def _added(self, total: Tensor | None, tensor: Tensor, number: int, gradient: Tensor, tile: _Tile) -> Tensor:
        """Return the gradient of argument `number`, with that of one tile."""
        place = self.tiled.proof.places[number]
        if place is None:
            return gradient if total is None else total + gradient
        if total is None:
            total = torch.zeros(tensor.shape, dtype=gradient.dtype, device=gradient.device)
        place.narrow(total, tile.first, tile.length).copy_(gradient)
        return total


@dataclass(slots=True, eq=False)
class _Tile:
    """Some tokens of a tiled call, in one pass.

    Attributes:
        first, length: which tokens.
        inputs: the call's tensors for them, where the tile's graph begins.
        targets: per input: what gets its gradient; None: it needs none.
    """

    first: int
    length: int
    inputs: list[Tensor]
    targets: list[GradientSum | None]

    @staticmethod
    def beginning_at(first: int, length: int, tensors: list[Tensor], trained: Sequence[bool]) -> _Tile:
        """Return a tile with detached `tensors`; those that are `trained` require gradients."""
        inputs = list(tensors)
        targets = [GradientSum(t) if needed else None for t, needed in zip(tensors, trained, strict=True)]
        ends = [place for place, target in enumerate(targets) if target is not None]
        made = cut([tensors[place] for place in ends], [target for target in targets if target is not None])
        for place, tensor in zip(ends, made, strict=True):
            inputs[place] = tensor
        return _Tile(first, length, inputs, targets)


class _Tiled(torch.autograd.Function):
    """The node of a tiled call in the layer's graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, work: _Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.harmony_work = work
        ctx.save_for_backward(*tensors)
        with torch.enable_grad():  # whether a graph is built may decide which kernels run
            made = work.forward(tensors)
        known = [output for output in work.tiled.proof.outputs if output.place is not None]
        ctx.mark_non_differentiable(*[t for t, output in zip(made, known, strict=True) if not output.requires_grad])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        work: _Work = ctx.harmony_work
        tensors = ctx.saved_tensors
        if all(gradient is None for gradient in gradients):
            return (None, None, *[None] * len(tensors))
        return (None, None, *work.backward(tensors, gradients))


# ---- outputs that nobody reads


class _Watch(EagerDispatchMode):
    """Observer of a run of a layer: is the output of its last tiled call read in the backward pass?

    It is not, if no operation after that call saves a tensor, or reads a value, and nothing else keeps tensors: as where an
    MLP's output is added to the residual, and that is the layer's result. Then a recomputation need not compute it.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = layer
        self.hooks = self._save, _same
        self._last = _NONE_UNREAD
        self._last_node = 0
        self._read = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tags = getattr(func, "tags", ())
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            self._read = True
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not observe while open, which takes time: a tiled call runs, before which nothing matters."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if _get_current_dispatch_mode() is not self or hooks is None or hooks[0] is not self.hooks[0]:
            yield  # the layer has put its own on top
            return
        with _pop_mode_temporarily():
            torch._C._autograd._pop_saved_tensors_default_hooks()
            try:
                yield
            finally:
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    def _save(self, tensor: Tensor) -> Tensor:
        """Note that the graph saves a tensor."""
        self._read = True
        return tensor.detach()  # the tensor itself would be a cycle, if it is the result of what saves it

    def returned(self, number: int) -> None:
        """Begin anew: the tiled call of this number has returned."""
        self._last, self._read = number, False
        self._last_node = torch._C._autograd._get_sequence_nr()

    def unread(self, outputs: Sequence[Tensor]) -> int:
        """Return the number of the tiled call whose output is not read; -1: there is none. `outputs`: of the layer."""
        if self._last < 0 or self._read or is_watched(self._layer):
            return _NONE_UNREAD
        for node in reachable_nodes(output.grad_fn for output in outputs):
            if is_of_autograd_function(node) and node._sequence_nr() >= self._last_node:
                return _NONE_UNREAD  # it may keep anything
        for module in self._layer.modules():
            if any(isinstance(value, Tensor) for value in vars(module).values()):
                return _NONE_UNREAD
        return self._last


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _nothing() -> None:
    """Add up no gradients."""
