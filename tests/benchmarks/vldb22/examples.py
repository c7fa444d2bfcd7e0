"""Models of a few layers with numbers to add up by hand, and any setup and schedule."""

from __future__ import annotations

from hypothesis import strategies as st

from benchmarks.vldb22.cost_model.jobs import Server
from benchmarks.vldb22.cost_model.profile import LayerCost, LayerProfile, PackCosts, PassCosts
from benchmarks.vldb22.cost_model.schedule import Mode, Schedule, Setup

MACHINE = Server(swap=100.0, peer=50.0, message=400.0, free_ms=1.0)
LAYERS = 6


def costs_of(layers: int = LAYERS) -> PackCosts:
    """Layer i: 100 (i + 1) bytes of weights, 10 (i + 1) of input per sample; forward 1 ms and both 3 ms per sample."""
    per_layer = tuple(LayerCost(100 * (i + 1), 0, 10 * (i + 1), update_ms=2.0) for i in range(layers))
    sizes = (1, 4)
    passes = [
        PassCosts(
            sizes,
            tuple((float(ms * size),) * layers for size in sizes),
            tuple(tuple(peak * (i + 1) * size for i in range(layers)) for size in sizes),
        )
        for ms, peak in ((1, 40), (3, 100))
    ]
    return PackCosts(LayerProfile(per_layer, *passes))


@st.composite
def bounds(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    inner = draw(st.lists(st.integers(1, layers - 1), unique=True, max_size=layers - 1)) if layers > 1 else []
    return (0, *sorted(inner), layers) if layers else (0,)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    devices = draw(st.integers(1, 8))
    return Setup(draw(st.sampled_from(Mode)), devices, draw(st.integers(devices, 3 * devices + 2)))


@st.composite
def schedules(draw: st.DrawFn, layers: int = LAYERS) -> Schedule:
    backward = draw(bounds(layers))
    forward = draw(bounds(backward[-2]))
    return Schedule(draw(st.integers(1, 5)), forward, draw(st.integers(1, 5)), backward)
