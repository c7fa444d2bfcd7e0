"""Layers that the program compiles run compiled; code compiled around an engine runs uncompiled."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import UnsupportedError
from harmony_ds.device.live_bytes import LiveBytes
from tests.engine.drive import adamw, config_of, engine_for, seed_of
from tests.engine.residual_net import ACCUMULATION, GROUPS, Net, built
from tests.oracle import train_plainly

BLOCKS = 4


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class GraphCounter:
    """Counts runs of the graphs that `backend` compiles to themselves."""

    def __init__(self) -> None:
        self.run = 0

        def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
            def compiled(*args: Any) -> Any:
                self.run += 1
                return graph.forward(*args)

            return compiled

        self.backend = backend  # a function: dynamo takes two wrappers around one callable object for two backends


def layers_replaced(model: Any, backend: Any) -> nn.Module:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block, backend=backend)
    return model


def layers_in_place(model: Any, backend: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def forwards(model: Any, backend: Any) -> nn.Module:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    return model


def whole(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


WAYS = [layers_replaced, layers_in_place, forwards, whole]
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or sys.version_info >= (3, 14), reason="inductor needs a C++ compiler"
)


def assert_trained_like_plain(model: nn.Module, bitwise: bool = True) -> None:
    """`model`, compiled or not, after a step over each of `GROUPS`."""
    plain = built(Net)
    train_plainly(plain, GROUPS, adamw(plain.parameters()), clip=None, seed_of=seed_of)
    mine = {name.replace("_orig_mod.", ""): parameter for name, parameter in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        if bitwise:
            assert torch.equal(mine[name], parameter)
        else:
            torch.testing.assert_close(mine[name], parameter)


@needs_compiler
@pytest.mark.parametrize("compiled", [layers_in_place, whole])
def test_compiled_by_inductor(compiled: Callable[[Any, str], Any]) -> None:
    """Inductor's results equal eager ones up to rounding."""
    try:
        torch.compile(torch.nn.Linear(8, 8), backend="inductor")(torch.ones(2, 8))
    except torch._dynamo.exc.BackendCompilerFailed as error:  # as with ATEN_CPU_CAPABILITY=default in torch 2.13
        pytest.skip(f"inductor compiles nothing here: {error}")
    model = built(Net)
    config = config_of(ACCUMULATION)
    with engine_for(compiled(model, "inductor"), lambda _: adamw(model.parameters()), config) as engine:
        for group in GROUPS:
            engine.train_batch(iter(group))
    assert_trained_like_plain(model, bitwise=False)


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("residency", [0, 1])
def test_every_layer_call_of_a_step_is_compiled(compiled: Callable[[Any, Any], Any], residency: int) -> None:
    """Though the model has been measured under modes that dynamo leaves code uncompiled for."""
    model, graphs = built(Net), GraphCounter()
    config = config_of(ACCUMULATION, None, {"pack_layers": 1, "residency": residency})
    with engine_for(compiled(model, graphs.backend), lambda _: adamw(model.parameters()), config) as engine:
        engine.train_batch(iter(GROUPS[0]))
        before = graphs.run
        engine.train_batch(iter(GROUPS[1]))
        # Each forward, and again in backward; what is compiled around layers may add graphs of its own.
        assert graphs.run - before >= 2 * BLOCKS * ACCUMULATION
        for group in GROUPS[2:]:
            engine.train_batch(iter(group))
    assert_trained_like_plain(model)


def test_the_engine_compiles_its_layers_with_what_it_is_given() -> None:
    model, graphs = built(Net), GraphCounter()
    with engine_for(model, adamw, config_of(ACCUMULATION, None, {"pack_layers": 1, "residency": 0})) as engine:
        assert engine.is_compiled is False
        engine.compile(backend=graphs.backend, compile_kwargs={"dynamic": False})
        engine.compile(backend="no such backend")  # is compiled already
        assert engine.is_compiled is True
        engine.train_batch(iter(GROUPS[0]))
        before = graphs.run
        engine.train_batch(iter(GROUPS[1]))
        layers = BLOCKS + 1  # and the head
        assert graphs.run - before == (2 * layers - 1) * ACCUMULATION  # the last one's graph is kept for its backward
        for group in GROUPS[2:]:
            engine.train_batch(iter(group))
    assert_trained_like_plain(model)
    before = graphs.run
    model(**GROUPS[0][0])
    assert graphs.run == before  # the model is plain again


def test_a_block_compiled_between_steps_is_run_compiled_from_then_on() -> None:
    model, graphs = built(Net), GraphCounter()
    with engine_for(model, adamw, config_of(ACCUMULATION)) as engine:
        for number, group in enumerate(GROUPS):
            if number == 1:
                layers_in_place(model, graphs.backend)
            engine.train_batch(iter(group))
            assert bool(graphs.run) is (number >= 1)
    assert_trained_like_plain(model)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "cudagraphs"},
        {"compile_kwargs": {"mode": "reduce-overhead"}},
        {"compile_kwargs": {"mode": "max-autotune"}},
        {"compile_kwargs": {"options": {"triton.cudagraphs": True}}},
        {"schedule": [(0, [])]},
        {"compiled_autograd_enabled": True},
    ],
    ids=str,
)
def test_compilations_that_an_engine_cannot_run_are_refused(options: dict[str, Any]) -> None:
    with engine_for(built(Net), adamw, config_of(ACCUMULATION)) as engine:
        with pytest.raises(UnsupportedError, match=r"engine\.compile\(\)"):
            engine.compile(**options)
        assert engine.is_compiled is False


# ---- around an engine


def looped(engine: Any, call: Callable[..., Any]) -> None:
    for group in GROUPS:
        for batch in group:
            engine.backward(call(**batch)["loss"])
            engine.step()


def of_engine(engine: Any) -> None:
    compiled = torch.compile(engine, backend="eager")
    looped(compiled, compiled)


def of_a_step(engine: Any) -> None:
    @torch.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = engine(x=x, y=y)["loss"]
        engine.backward(loss)
        engine.step()
        return loss

    for group in GROUPS:
        for batch in group:
            step(**batch)


# Dynamo looks at a loss that goes from one graph to the next.
@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
@pytest.mark.parametrize("program", [of_engine, of_a_step])
def test_compiled_code_around_an_engine_trains_like_plain(program: Callable[[Any], None]) -> None:
    model = built(Net)
    with engine_for(model, adamw, config_of(ACCUMULATION)) as engine:
        program(engine)
    assert_trained_like_plain(model)


def test_a_function_first_run_under_a_dispatch_mode_is_compiled_later() -> None:
    graphs = GraphCounter()
    double = torch.compile(lambda x: x * 2, backend=graphs.backend)
    with LiveBytes() as probe:
        double(torch.ones(3))
        assert probe.peak_bytes() == 24  # the operand's and the result's
        assert graphs.run == 0
    double(torch.ones(3))
    assert graphs.run == 1
