"""Prove that a call of a module treats the tokens of a dimension alike and by themselves, so that it may run in tiles.

The call is traced on fake tensors, without values, memory or kernels: `TokenTrace` carries the dimension that holds tokens
through the aten operations, by the rules of `token_rules`. It is traced with all tokens and with as many as each tile has,
and must run the same operations with the same constants: then a length that the code computes with (a capacity, a mean, a
branch for long rows, positions from 0 on) shows, at the very lengths that are run. Autograd's own derivatives of such
operations mix no tokens either; an `autograd.Function` may, so a call that uses one is refused, as is all that is unknown.

Why not by trial, comparing a few tokens taken through the module together and in parts? A trial needs values: on the meta
device, made-up weights of full size (of an 8B model, most of an estimate's 20 s), and it misses what only more tokens show.
A proof takes less than a millisecond an operation: 9 ms for a norm, 17 ms for an MLP of Llama 8B at 32,768 tokens.

Refused are calls with random numbers, that set attributes or change buffers or inputs, and modules with hooks on modules
inside of them (as transformers' output collectors have).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from harmony_ds.device.live_bytes import tensors_among
from harmony_ds.model.arguments import PLAIN
from harmony_ds.model.graph_cut import is_of_autograd_function, reachable_nodes
from harmony_ds.model.own_settings import CONTAINERS, refill
from harmony_ds.model.patching import patched
from harmony_ds.model.random_streams import read_python_state, set_python_state
from harmony_ds.model.token_rules import SIZED_BY_TOKENS, Operation, TokenPlace, TokensMixedError, result_place
from harmony_ds.model.trees import TreeStructure, flatten_all, unflatten_all

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """One leaf of a call's result: a tensor with the tokens at `place`, or (None) the plain `value`.

    Attributes:
        shape, dtype, requires_grad: of the tensor, as the call with all tokens gives it.
    """

    value: Any = None
    place: TokenPlace | None = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TokenProof:
    """What is known of a call whose tokens are independent.

    Attributes:
        places: per tensor argument where it holds the tokens; None: all tokens share it.
        outputs, structure: the call's result.
        inner_bytes: what its graph keeps beside its inputs, outputs and parameters.
        input_bytes: bytes of the inputs that hold tokens.
    """

    places: tuple[TokenPlace | None, ...]
    outputs: tuple[OutputLeaf, ...]
    structure: TreeStructure
    inner_bytes: int
    input_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """A call of a module, taken apart: leaves of its arguments, their structure, and which leaves are tensors."""

    module: nn.Module
    forward: Forward
    leaves: list[Any]
    structure: TreeStructure
    tensor_places: list[int]

    @staticmethod
    def taken_apart(module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleCall:
        leaves, structure = flatten_all((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return ModuleCall(module, forward, leaves, structure, places)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.leaves[place] for place in self.tensor_places]

    def without_tensors(self) -> ModuleCall:
        """Return the call with gaps in the places of its tensors."""
        leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return replace(self, leaves=leaves)

    @property
    def has_plain_rest(self) -> bool:
        """Whether its other arguments are plain values, into which it cannot write."""
        return all(leaf is None or isinstance(leaf, (Tensor, *PLAIN)) for leaf in self.leaves)

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Call the forward with `tensors` instead of its own."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.tensor_places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = unflatten_all(leaves, self.structure)
        return self.forward(*args, **kwargs)


def places_of(tensors: Sequence[Tensor], dim: int) -> tuple[TokenPlace | None, ...]:
    """Return where each tensor holds tokens, if the first holds them in `dim`: those as long there hold them, too."""
    count = tensors[0].shape[dim]
    return tuple(TokenPlace(dim) if t.dim() > dim and t.shape[dim] == count else None for t in tensors)


def is_watched(module: nn.Module) -> bool:
    """Return whether hooks see calls of modules inside `module`."""
    if (
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
    ):
        return True
    for inner in module.modules():
        if inner is not module and (
            inner._forward_hooks or inner._forward_pre_hooks or inner._backward_hooks or inner._backward_pre_hooks
        ):
            return True
    return False


def prove(call: ModuleCall, dim: int, tiles: Iterable[int]) -> TokenProof:
    """Return what is known of a call whose first tensor holds tokens in `dim`; `tiles`: numbers of tokens that it may have.

    Raises:
        TokensMixedError: it cannot be shown that each token is treated by itself; says why.
    """
    places = places_of(call.tensors, dim)
    count = call.tensors[0].shape[dim]
    if is_watched(call.module):
        raise TokensMixedError("hooks see what is inside")
    if not call.has_plain_rest:
        raise TokensMixedError("an argument is an object that it may write into")
    # Not the call itself: an error that is raised inside keeps what its frames know, for a while.
    rest, given = call.without_tensors(), [_Given.of(*pair) for pair in zip(call.tensors, places, strict=True)]
    whole = _trace(rest, given, count)
    for tile in sorted({*tiles} - {count}):
        part = _trace(rest, given, tile)
        if part.operations != whole.operations or part.constants != whole.constants:
            raise TokensMixedError(f"other operations or constants are run with {tile} tokens than with {count}")
    return TokenProof(places, whole.outputs, whole.structure, whole.inner_bytes, whole.input_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Traced:
    """One traced run; `operations` and `constants` are the same for every number of tokens if these are independent."""

    operations: list[Any]
    constants: list[Any]
    outputs: tuple[OutputLeaf, ...]
    structure: TreeStructure
    inner_bytes: int
    input_bytes: int


@dataclass(frozen=True, slots=True)
class _Given:
    """An argument of a call, without its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_contiguous: bool
    place: TokenPlace | None

    @staticmethod
    def of(tensor: Tensor, place: TokenPlace | None) -> _Given:
        kind = tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_contiguous()
        return _Given(tuple(tensor.shape), tensor.stride(), *kind, place)

    def fake(self, count: int) -> Tensor:
        """Return such a tensor with `count` tokens, contiguous if it is."""
        shape = list(self.shape)
        if self.place is not None:
            shape[self.place.dim] = count
        like = torch.empty(shape, dtype=self.dtype, device=self.device)
        if not self.is_contiguous:
            order = sorted(range(len(shape)), key=lambda dim: -self.strides[dim])
            like = like.permute(order).contiguous().permute([order.index(dim) for dim in range(len(shape))])
        return like.detach().requires_grad_(self.requires_grad)


def _trace(call: ModuleCall, given: Sequence[_Given], count: int) -> _Traced:
    fake = _mode_without_addresses()
    trace = TokenTrace(count)
    with _disable_current_modes(), _nothing_changed(call.module), fake:
        inputs = [trace.given(one.fake(count), one.place) for one in given]
        with (
            patched(_fake_state(call.module, trace)),
            torch.autograd.graph.saved_tensors_hooks(trace.note_saved, _never_unpacked),
            _NoHooks(),
            trace,
            torch.enable_grad(),
        ):
            try:
                result = call.run(inputs)
            except TokensMixedError:
                raise
            except Exception as error:
                raise TokensMixedError(f"it cannot be traced: {error!r:.200}") from error
        if trace.refusal is not None:  # which the module's own code may have caught
            raise TokensMixedError(trace.refusal)
        leaves, structure = flatten_all((result,))
        outputs, constants = trace.outputs_among(leaves)
        held = sum(t.numel() * t.element_size() for t, one in zip(inputs, given, strict=True) if one.place is not None)
        return _Traced(trace.operations, constants, outputs, structure, trace.inner_bytes(leaves), held)


def _mode_without_addresses() -> FakeTensorMode:
    """Return a mode of fake tensors that raise an error when they are asked for their address.

    A kernel that is launched past torch's operators (in Triton, as Liger's are, or by an extension) would take address 0,
    and after an illegal access CUDA is of no use to the process any more.
    """
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        return FakeTensorMode()


def _fake_state(module: nn.Module, trace: TokenTrace) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield what gives each module inside `module` fake parameters and buffers."""
    known: dict[int, Tensor] = {}

    def fake(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in known:
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            like.requires_grad_(tensor.requires_grad)
            known[id(tensor)] = trace.given(nn.Parameter(like, tensor.requires_grad), None)
        return known[id(tensor)]

    for inner in module.modules():
        yield vars(inner), "_parameters", {name: fake(own) for name, own in inner._parameters.items()}
        yield vars(inner), "_buffers", {name: fake(own) for name, own in inner._buffers.items()}


class TokenTrace(TorchDispatchMode):
    """Follows the place of tokens through operations on fake tensors, and lists the operations.

    Attributes:
        operations: so far, with the tokens taken out of all shapes.
        refusal: why tokens are not independent; None: they have been so far.
    """

    def __init__(self, count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count
        self._places: dict[int, TokenPlace | None] = {}
        self._alive: list[Tensor] = []  # ids and storages are of tensors that live
        self._given: set[int] = set()  # storages of inputs, parameters and buffers
        self._saved: dict[int, int] = {}
        self.operations: list[Any] = []
        self.refusal: str | None = None

    def given(self, tensor: Tensor, place: TokenPlace | None) -> Tensor:
        """Note a tensor that the call is given, which it must not change; return it."""
        self._given.add(tensor.untyped_storage()._cdata)
        self._note(tensor, place)
        return tensor

    def _note(self, tensor: Tensor, place: TokenPlace | None) -> None:
        if place is not None and place.tokens_in(tensor) != self._count:
            raise TokensMixedError(f"{place.tokens_in(tensor)} of {self._count} tokens are left")
        self._places[id(tensor)] = place
        self._alive.append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # a tensor's device, say
            return func(*args, **(kwargs or {}))
        try:
            return self._operation(func, args, kwargs or {})
        except TokensMixedError as error:
            self.refusal = str(error)
            raise

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.refusal is not None:
            raise TokensMixedError(self.refusal)
        if func.namespace != "aten":
            raise TokensMixedError(f"{func} is not known")
        if func._overloadpacket.__name__ == "lift_fresh":  # a constant of the code's
            (constant,) = args
            with _disable_current_modes():
                self.operations.append(("constant", constant.dtype, repr(constant.tolist())))
            result = func(*args, **kwargs)
            self._note(result, None)
            return result
        operation = Operation(func, args, kwargs, self._place_of)
        if torch.Tag.nondeterministic_seeded in func.tags:
            operation.refuse()
        written = [*_written(func, args, kwargs)]
        if any(tensor.untyped_storage()._cdata in self._given for tensor in written):
            raise TokensMixedError(f"{operation.name} changes an input, a parameter or a buffer")
        before = [self._normal(one) for one in self._constants_of(operation, args, kwargs)]
        result = func(*args, **kwargs)
        operation.result = result
        place = result_place(operation)
        if any(self._place_of(tensor) != place for tensor in written):
            operation.refuse()
        results = [*tensors_among(result)]
        if not results:
            raise TokensMixedError(f"{operation.name} reads values")
        for tensor in results:
            self._note(tensor, place)
        self.operations.append((str(func), before, [self._normal(tensor) for tensor in results]))
        return result

    def _place_of(self, tensor: Tensor) -> TokenPlace | None:
        if id(tensor) not in self._places:
            raise TokensMixedError("a tensor is used that is neither argument, parameter nor buffer")
        return self._places[id(tensor)]

    def _constants_of(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that must not depend on the number of tokens."""
        place = self._place_of(operation.tensors[0]) if operation.tensors else None
        if place is not None:
            if operation.name in SIZED_BY_TOKENS:
                return [args[0]]
            if operation.name == "slice" and operation.dims() == [place.dim]:
                return [args[0]]  # a slice of all tokens, or it is refused
        return [args, kwargs]

    def _normal(self, value: Any) -> Any:
        """Return what `value` is, whatever the number of tokens."""
        if isinstance(value, Tensor):
            place = self._place_of(value)
            shape: list[Any] = list(value.shape)
            if place is not None:
                shape[place.dim] = "tokens"
            return shape, value.dtype, place
        if isinstance(value, (list, tuple)):
            return [self._normal(one) for one in value]
        if isinstance(value, dict):
            return {key: self._normal(one) for key, one in value.items()}
        if value is None or isinstance(value, (*PLAIN, torch.memory_format)):
            return repr(value)
        raise TokensMixedError(f"an operation is given {type(value).__name__}")

    def note_saved(self, tensor: Tensor) -> int:
        """Note what the graph keeps."""
        storage = tensor.untyped_storage()
        self._saved[storage._cdata] = storage.nbytes()
        return 0

    def inner_bytes(self, outputs: Sequence[Any]) -> int:
        """Return the bytes that the graph keeps beside what the call was given and returns."""
        around = self._given | {t.untyped_storage()._cdata for t in outputs if isinstance(t, Tensor)}
        return sum(nbytes for storage, nbytes in self._saved.items() if storage not in around)

    def outputs_among(self, leaves: Sequence[Any]) -> tuple[tuple[OutputLeaf, ...], list[Any]]:
        """Return the leaves of the result, and what of them does not depend on the number of tokens.

        Raises:
            TokensMixedError: a tensor does not hold tokens, or is memory that the call was given, or another's; or a
                function of the program's own computes gradients.
        """
        outputs: list[OutputLeaf] = []
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        if not tensors or len({*storages}) < len(storages) or not self._given.isdisjoint(storages):
            raise TokensMixedError("it returns no tensor, or what it was given")
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                if leaf is not None and not isinstance(leaf, PLAIN):
                    raise TokensMixedError(f"it returns {type(leaf).__name__}")
                outputs.append(OutputLeaf(leaf))
                continue
            place = self._place_of(leaf)
            if place is None:
                raise TokensMixedError("it returns a tensor without tokens")
            outputs.append(OutputLeaf(None, place, tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
        if any(map(is_of_autograd_function, reachable_nodes(t.grad_fn for t in tensors))):
            raise TokensMixedError("an autograd.Function computes its gradients")
        constants = [self._normal(leaf) for leaf in leaves]
        return tuple(outputs), constants


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes into."""
    if func._schema.is_mutable:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tensors_among(args[place] if place < len(args) else kwargs.get(argument.name))


def _never_unpacked(_: object) -> Tensor:
    raise AssertionError("a trace is not propagated through")


class _NoHooks(TorchFunctionMode):
    """Refuses hooks on tensors, which may see gradients of all tokens."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            raise TokensMixedError("it registers a hook on a tensor")
        return func(*args, **(kwargs or {}))


@contextmanager
def _nothing_changed(module: nn.Module) -> Iterator[None]:
    """Restore attributes of the modules inside `module`, and Python's random numbers, in the end.

    Raises:
        TokensMixedError: they had changed.
    """
    modules = [*module.modules()]
    before = [dict(vars(one)) for one in modules]
    contents = [{name: held.copy() for name, held in own.items() if type(held) in CONTAINERS} for own in before]
    numbers = read_python_state()
    changed = False
    try:
        yield
    finally:
        if read_python_state() != numbers:
            changed = True
            set_python_state(numbers)
        for one, own, held in zip(modules, before, contents, strict=True):
            if not _same_items(vars(one), own):
                changed = True
                refill(vars(one), own)
            for name, items in held.items():
                if not _same_items(own[name], items):
                    changed = True
                    refill(own[name], items)
    if changed:
        raise TokensMixedError("it changes attributes of modules, or draws random numbers")


def _same_items(one: Any, other: Any) -> bool:
    """Return whether two containers hold the same objects."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    return {*map(id, one)} == {*map(id, other)} if isinstance(one, set) else [*map(id, one)] == [*map(id, other)]
