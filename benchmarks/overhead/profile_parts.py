"""Where the main thread's time goes: cProfile's own times, less what cProfile itself costs, summed by part.

A function of harmony_ds belongs to the part of its module (or to one named for it). What it calls of C, or of the few
Python helpers listed here, is counted to it or to the helper's part; everything else of torch and transformers is
"torch itself".
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

Function = tuple[str, int, str]  # file, line, name; file "~" is C

_TORCH = "torch itself"
_LANE = "lane switch"
_TREES = "flatten, unflatten"
_BOUNDARY = "boundary, inter-layer graph"
_RNG = "random state"
_INSTALLATION = "installation parameters and buffers"
_SCANS = "scans over modules and buffers"
_CONTEXTS = "context managers (grad mode, autocast, contextlib)"
_CALLS = "layer call bookkeeping"
_SWAP_IN = "swap-in, evict, leaves, gradient sums"
_STASH = "stash"
_UPDATES = "swap-out, norm, update wait"
_EXECUTOR = "executor, memory accounting"
_STEP = "step set-up (queue, plan, batches)"
_STATE = "what calls saw, and what was done to parameters by hand"

_MODULES = {
    "runtime/lane.py": _LANE,
    "runtime/thread_state.py": _LANE,
    "runtime/executor.py": _EXECUTOR,
    "runtime/updates.py": _UPDATES,
    "runtime/micro_batch.py": _EXECUTOR,
    "calls/trees.py": _TREES,
    "calls/arguments.py": _TREES,
    "calls/caches.py": _TREES,
    "calls/boundary.py": _BOUNDARY,
    "calls/inter_layer.py": _BOUNDARY,
    "calls/targets.py": _BOUNDARY,
    "calls/storages.py": _BOUNDARY,
    "calls/random_streams.py": _RNG,
    "calls/installed.py": _INSTALLATION,
    "calls/buffers.py": _INSTALLATION,
    "calls/layer_call.py": _CALLS,
    "calls/called_layer.py": _CALLS,
    "calls/saved_inputs.py": _CALLS,
    "calls/recorded_call.py": _CALLS,
    "calls/intercept.py": _CONTEXTS,
    "calls/contract.py": _STATE,
    "parameters/link.py": _STATE,
    "parameters/engine_parameter.py": _STATE,
    "stepping/": _STEP,
    "offload/residency.py": _SWAP_IN,
    "offload/host_store.py": _SWAP_IN,
    "offload/stash.py": _STASH,
    "offload/updater.py": _UPDATES,
    "offload/host_gradients.py": _UPDATES,
    "offload/host_optimizer.py": _UPDATES,
    "device/": _EXECUTOR,
    "torch/utils/_pytree.py": _TREES,
    "torch/autograd/grad_mode.py": _CONTEXTS,
    "torch/utils/_contextlib.py": _CONTEXTS,
    "contextlib.py": _CONTEXTS,
    "torch/random.py": _RNG,
    "torch/nn/parameter.py": _SWAP_IN,
    "torch/autograd/function.py": _BOUNDARY,
    "torch/_functorch/utils.py": _BOUNDARY,
    "threading.py": _UPDATES,
    "copy.py": _TREES,
    "dataclasses.py": _TREES,
    "typing.py": _TREES,
}
_FUNCTIONS = {
    "calls/layer_call.py": {
        "_cut_outputs": _BOUNDARY,
        "_look_at_buffers": _SCANS,
        "_keep": _STASH,
        "_tensor": _STASH,
        "discard": _STASH,
    },
    "device/host_streams.py": {"random_state": _RNG, "set_random_state": _RNG, "seed": _RNG},
    "torch/nn/modules/module.py": dict.fromkeys(
        ("modules", "named_modules", "buffers", "named_buffers", "_named_members", "<lambda>"), _SCANS
    ),
}
_C_FUNCTIONS = {"get_state": _RNG, "set_state": _RNG, "run_backward": _TORCH}


def profiled(function: Callable[[], object]) -> dict[str, Any]:
    """Runs `function` under cProfile.

    Returns:
        parts: seconds of own time by part. functions: the 40 most expensive: name, part, calls, seconds.
    """
    callee_cost, caller_cost = _cost_of_profiling()
    profile = cProfile.Profile()
    profile.enable()
    function()
    profile.disable()
    times = _own_times(profile, callee_cost, caller_cost)
    parts: dict[str, float] = defaultdict(float)
    for _, part, _, seconds in times:
        parts[part] += seconds
    times.sort(key=lambda row: -row[3])
    return {"parts": dict(parts), "functions": [list(row) for row in times[:40]]}


def _own_times(profile: cProfile.Profile, callee_cost: float, caller_cost: float) -> list[tuple[str, str, int, float]]:
    """Name, part, calls and own seconds; a C function has a row for each part that calls it."""
    stats: dict[Function, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    made: dict[Function, int] = defaultdict(int)  # calls that a function makes
    for _, _, _, _, callers in stats.values():
        for caller, (calls, *_) in callers.items():
            made[caller] += calls
    rows: dict[tuple[str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for function, (_, calls, own, _, callers) in stats.items():
        shares = [(caller, c, t) for caller, (c, _, t, _) in callers.items()] if function[0] == "~" else []
        for caller, share_calls, seconds in shares or [(function, calls, own)]:
            less = share_calls * callee_cost + (0 if shares else made[function] * caller_cost)
            key = (_name(function), _part(function, caller))
            known_calls, known = rows[key]
            rows[key] = (known_calls + share_calls, known + max(0.0, seconds - less))
    return [(name, part, calls, seconds) for (name, part), (calls, seconds) in rows.items()]


def _part(function: Function, caller: Function) -> str:
    if function[0] == "~":
        for name, part in _C_FUNCTIONS.items():
            if f"'{name}'" in function[2] or f".{name}" in function[2]:
                return part
        function = caller
    file = PurePath(function[0]).as_posix()
    for ending, names in _FUNCTIONS.items():
        if file.endswith(ending) and function[2] in names:
            return names[function[2]]
    for ending, part in _MODULES.items():
        if file.endswith(ending) or (ending.endswith("/") and f"harmony_ds/{ending}" in file):
            return part
    return _STEP if "/harmony_ds/" in file else _TORCH


def _name(function: Function) -> str:
    if function[0] == "~":
        return function[2]
    return f"{'/'.join(PurePath(function[0]).parts[-2:])}:{function[2]}"


def _nothing() -> None:
    return None


def _cost_of_profiling(calls: int = 50_000) -> tuple[float, float]:
    """Seconds that cProfile adds per call: to the function called, and to the one that calls."""

    def loop() -> None:
        for _ in range(calls):
            _nothing()

    start = time.perf_counter()
    loop()
    plain = time.perf_counter() - start
    profile = cProfile.Profile()
    profile.enable()
    loop()
    profile.disable()
    stats: dict[Function, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = {function[2]: row[2] for function, row in stats.items()}
    return own["_nothing"] / calls, max(0.0, own["loop"] - plain) / calls
