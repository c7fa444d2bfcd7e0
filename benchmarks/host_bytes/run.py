"""How many bytes of host memory a parameter does training take, by setting, and with ZeRO-Offload? Measured of the process.

    OMP_NUM_THREADS=1 python -m benchmarks.host_bytes.run [MODEL]     # llama-718m; writes results/host_bytes.json

Each row is a process of its own, and its memory before the model is taken off: what it holds after two steps ("held", of
which "device" lies on the device: the CPU), what `memory_report()` says of the host then, and the most there was ("peak").
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, answers_of, quiet, status_bytes, write_results
from harmony_ds.bench.engines import adapter
from harmony_ds.bench.workload import Workload

_CONFIG: dict[str, Any] = {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}}
_STATE_16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
_CLIPPED: dict[str, dict[str, Any]] = {
    "as it is": {},
    "split masters": {"harmony": {"split_masters": True}},
    "16-bit state": {"bf16": _STATE_16, "zero_optimization": {"stage": 2}},
}
SETTINGS = _CLIPPED | {f"{name}, no clipping": {**one, "gradient_clipping": 0.0} for name, one in _CLIPPED.items()}
for _name in ("split masters, no clipping", "16-bit state, no clipping"):
    _small = {**SETTINGS[_name].get("harmony", {}), "pack_layers": 1, "gradient_slabs": 1}
    SETTINGS[f"{_name}, small slabs"] = {**SETTINGS[_name], "harmony": _small}
SETTINGS |= {"deepspeed-zero2-offload": {}, "deepspeed-zero3-offload": {}}


def trained(name: str, model: str) -> dict[str, Any]:
    """Train for two steps of two micro-batches; return parameters and bytes."""
    path = str(ROOT / "benchmarks" / "models" / f"{model}.json")
    task = Workload(path, _CONFIG | SETTINGS[name], rows=1, micro_batch=1, accumulation=2, sequence=16, memory_gib=0.4)
    count = sum(p.numel() for p in task.subject.model.parameters())
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    engine = adapter(name if name.startswith("deepspeed") else "harmony").build(task)
    for step in range(2):
        engine.step(task.batches(step))
        engine.drain()
    ctypes.CDLL(None).malloc_trim(0)
    found = {"parameters": count, "held": status_bytes("VmRSS"), "peak": status_bytes("VmHWM")}
    if (own := getattr(engine, "_engine", None)) is not None:
        found["device"] = own._state.runtime.device.allocated_bytes()
        found["reported"] = sum(own.memory_report().host_bytes.values())
    return found


def main() -> None:
    model, *only = sys.argv[1:] or ["llama-718m"]
    quiet()
    if only:
        trained(only[0], "llama-7m")  # what is loaded on first use is there now
        base, found = status_bytes("VmRSS"), trained(only[0], model)
        print(json.dumps({"setting": only[0], **found, "held": found["held"] - base, "peak": found["peak"] - base}))
        return
    rows = []
    for name in SETTINGS:
        rows += answers_of("benchmarks.host_bytes.run", model, name)
        each = [f"{kind} {n / rows[-1]['parameters']:.2f}" for kind, n in rows[-1].items() if kind != "setting"]
        print(f"{name:<44}" + ", ".join(each[1:]), flush=True)
    write_results("host_bytes", {"rows": rows})


if __name__ == "__main__":
    main()
