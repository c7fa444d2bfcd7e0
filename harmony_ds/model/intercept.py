"""How the engine gets hold of layer calls: each layer's `forward` is replaced, and its class and signature stay.

Each layer's `forward` becomes an `InterceptedForward`, which hands calls to the handler that is active on the calling
thread: a `Lane` waits, a `Streamer` runs the layer at once. Without a handler the layer runs as it is. `torch.compile`
around layers cannot trace into a layer call, so the layer's own forward is compiled instead.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.utils.prune import BasePruningMethod

from harmony_ds.decomposer.find import Layer
from harmony_ds.device.base import Device
from harmony_ds.errors import UnsupportedError
from harmony_ds.model.own_settings import LaneSettings

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
_NOTHING_TO_SET = nullcontext()  # one for all: each task enters it
ContextFactory = Callable[[], AbstractContextManager[object]]
"""Function that makes a context, to be entered once."""


@dataclass(frozen=True, slots=True)
class Autocast:
    """An autocast context to be entered later, on another thread; one that is off is entered where one is on."""

    device_type: str
    dtype: torch.dtype
    enabled: bool = True

    @staticmethod
    def current(device_type: str) -> Autocast | None:
        """Return the calling thread's; None where the device has none."""
        if not _has_autocast(device_type):
            return None
        return _autocast(device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))

    @staticmethod
    def entered(state: Autocast | None) -> AbstractContextManager[Any]:
        """Return the context of `state`, without a weight cache: that is keyed by tensors that are swapped."""
        if state is None or not state.matters:
            return _NOTHING_TO_SET
        return torch.autocast(state.device_type, state.dtype, state.enabled, cache_enabled=False)

    @property
    def matters(self) -> bool:
        """Whether entering it may change anything."""
        return self.enabled or torch.is_autocast_enabled(self.device_type)


_has_autocast = functools.cache(torch.amp.is_autocast_available)
_autocast = functools.cache(Autocast)  # a frozen object takes as long to make as a dozen calls


@dataclass(slots=True, eq=False)
class Request:
    """A layer call that the model's code has begun, and that the engine is to answer with outputs.

    Attributes:
        layer: index of the layer.
        forward: the layer's own forward, bound.
        context, grad, autocast: the caller's context variables, grad mode and autocast.
        around: makes the context of torch's modes and switches that the caller has set, and equals that of another caller
            who has set the same; None: none.
        lane_settings: settings of modules that the caller has made for itself; None: none.
        raised: ids of exceptions of the layer's forward (the exceptions would keep the request, by their tracebacks).
    """

    layer: int
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: contextvars.Context
    grad: bool
    autocast: Autocast | None
    around: ContextFactory | None = None
    lane_settings: LaneSettings | None = None
    raised: list[int] = field(default_factory=list)

    @property
    def finds_its_modes(self) -> bool:
        """Whether the modes of the caller are in force already, as in most calls."""
        if self.around is not None or torch.is_grad_enabled() is not self.grad:
            return False
        autocast = self.autocast
        return autocast is None or not (autocast.enabled or torch.is_autocast_enabled(autocast.device_type))

    @contextmanager
    def callers_modes(self) -> Iterator[None]:
        """Set the grad mode, the autocast, and the modes and switches of torch of the caller, while open."""
        around = nullcontext() if self.around is None else self.around()
        with torch.set_grad_enabled(self.grad), Autocast.entered(self.autocast), around:
            yield


class Handler(Protocol):
    """Decides when and how layer calls run: those of the engine with this device."""

    device: Device

    def call(self, request: Request) -> Any:
        """Return the outputs of the layer call."""


class _Active(threading.local):
    handler: Handler | None = None


_active = _Active()


def is_between_layers() -> bool:
    """Return whether the calling thread runs a model's code for a handler, outside layer calls."""
    return _active.handler is not None


def active_handler() -> Handler | None:
    """Return what handles layer calls of the calling thread."""
    return _active.handler


def set_handler(handler: Handler) -> None:
    """Let layer calls of the calling thread go to `handler` from now on."""
    _active.handler = handler


def is_intercepted(module: nn.Module) -> bool:
    """Return whether `module` is a layer, or contains one."""
    return any(isinstance(vars(one).get("forward"), InterceptedForward) for one in module.modules())


class handled_by:  # noqa: N801 - used as a function; a class, because it is entered for each layer call
    """Context in which layer calls of this thread go to `handler`, or (None) run as they are."""

    __slots__ = ("_before", "_handler")

    def __init__(self, handler: Handler | None) -> None:
        self._handler = handler

    def __enter__(self) -> Handler | None:
        """Return the handler before."""
        self._before, _active.handler = _active.handler, self._handler
        return self._before

    def __exit__(self, *_: object) -> None:
        _active.handler = self._before


class InterceptedForward:
    """Replacement of a layer's `forward`, among its instance attributes. A copied or pickled layer gets its own forward."""

    def __init__(self, layer: Layer, device: Device) -> None:
        # The instance may have a forward of its own already (accelerate sets one).
        self.before = layer.module.__dict__.get("forward")
        self.module_class = type(layer.module)
        functools.update_wrapper(self, layer.module.forward)
        self._layer, self._device = layer, device
        self._forward = self._handled = layer.module.forward
        self._compiler: Compiler | None = None

    def give_back(self) -> None:
        """Give the layer its own forward back, unless the program has replaced or deleted it."""
        held = self._layer.module.__dict__
        if held.get("forward") is self:
            del held["forward"]
            if self.before is not None:
                held["forward"] = self.before

    @property
    def own(self) -> Callable[..., Any]:
        """The layer's forward, as the program wrote it."""
        return self._forward

    def compile(self, compiler: Compiler | None) -> None:
        """Let handlers run the layer's forward as `compiler` compiles it; None: uncompiled."""
        if compiler is not self._compiler:
            self._compiler = compiler
            self._handled = self._forward if compiler is None else compiler(self._forward)

    @_disable_dynamo  # compiled code around a layer ends here, and begins again with the layer's own forward
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handler, layer = _active.handler, self._layer
        if handler is None or handler.device is not self._device:  # no engine runs, or another one's
            return self._forward(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UnsupportedError(
                f"layer {layer.name} is called inside a transform of torch.func (vmap, grad, jvp), and runs later. "
                "Transform within one layer's forward, or name a module that contains it in harmony.layers."
            )
        autocast = Autocast.current(self._device.torch_device.type)
        context, grad = contextvars.copy_context(), torch.is_grad_enabled()
        forward = self._handled
        if layer.module._forward_pre_hooks:
            forward = _with_pruning(layer.module, forward)
        return handler.call(Request(layer.index, forward, args, kwargs, context, grad, autocast))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.before is None:
            return getattr, (self._layer.module, "forward")  # of the copy, which has no attributes yet: its class's
        return itemgetter(0), ((self.before,),)


def _forward_of_class(module_class: type) -> object:
    """Return what a class of modules has as its forward, as it stands there."""
    for cls in module_class.__mro__:
        if "forward" in cls.__dict__:
            return cls.__dict__["forward"]
    return None


class Interception:
    """Intercepts the layers of one model until `remove`."""

    def __init__(self, layers: tuple[Layer, ...], model: nn.Module, device: Device) -> None:
        self._device = device
        self._forwards: dict[Layer, InterceptedForward] = {}
        # The forward of each class of layers, as it was when last intercepted:
        self._of_classes: dict[type, object] = {}
        self._compiler: Compiler | None = None
        self._inside: dict[nn.Module, list[Layer]] = {}  # layers by modules around them, outer modules first
        modules = dict(model.named_modules(remove_duplicate=False))
        for layer in layers:
            self._intercept(layer)
            if "dynamo_ctx" not in vars(modules[layer.name]):  # else it has a compiled forward already
                for name in _names_around(layer.name):
                    self._inside.setdefault(modules[name], []).append(layer)

    def _intercept(self, layer: Layer) -> None:
        known = self._forwards.get(layer)
        if known is not None:
            known.give_back()
        intercepted = InterceptedForward(layer, self._device)
        self._of_classes[intercepted.module_class] = _forward_of_class(intercepted.module_class)
        layer.module.__dict__["forward"] = self._forwards[layer] = intercepted

    def replaced(self) -> list[Layer]:
        """Return the layers whose `forward` the program has replaced, or their class's."""
        unchanged = {cls for cls, forward in self._of_classes.items() if _forward_of_class(cls) is forward}
        found: list[Layer] = []
        for layer, own in self._forwards.items():
            held, module_class = layer.module.__dict__, type(layer.module)
            is_own = "forward" in held and held["forward"] is own
            if not is_own or module_class is not own.module_class or module_class not in unchanged:
                found.append(layer)
        return found

    def adopt_replaced(self) -> None:
        """Intercept replaced forwards, and compile layers as the innermost module around each is compiled by now:
        by `torch.compile(module)` or `module.compile()`.
        """
        for layer in self.replaced():
            self._intercept(layer)
        compilers = dict.fromkeys(self._forwards, self._compiler)
        for module, layers in self._inside.items():
            if (compiler := _compiler_of(module)) is not None:
                compilers |= dict.fromkeys(layers, compiler)
        for layer, compiler in compilers.items():
            self._forwards[layer].compile(compiler)

    def compile(self, compiler: Compiler) -> None:
        """Compile layers by `compiler` that the program does not compile itself, from the engine's next call on."""
        self._compiler = compiler

    def remove(self) -> None:
        """Give every layer its own forward back."""
        for intercepted in self._forwards.values():
            intercepted.give_back()
        self._forwards.clear()


def _names_around(name: str) -> list[str]:
    """Return the names of the modules around the module `name`, outermost first (the model's is ""), and its own."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def _with_pruning(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that makes pruned weights again, of the parameters that the layer's call has.

    The hooks of `torch.nn.utils.prune` have made them before the call, as attributes with a graph that other calls share.
    """
    pruning = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, BasePruningMethod)]
    if not pruning:
        return forward

    def pruned_forward(*args: Any, **kwargs: Any) -> Any:
        for hook in pruning:
            hook(module, args)
        return forward(*args, **kwargs)

    return pruned_forward


def _compiler_of(module: nn.Module) -> Compiler | None:
    """Return the compiler of a `torch.compile(module)`, or after `module.compile()`; dynamo is not imported (seconds)."""
    own = vars(module)
    compiled = own.get("_compiled_call_impl")
    if compiled is None or "dynamo_ctx" in own:
        return own.get("dynamo_ctx")
    in_place: Compiler = inspect.getclosurevars(compiled).nonlocals["self"]
    return in_place
