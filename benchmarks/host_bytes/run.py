"""How much host memory does training take, by setting, and ZeRO-Offload's? Bytes a parameter, of the process itself.

    OMP_NUM_THREADS=1 python -m benchmarks.host_bytes.run [MODEL]     # llama-718m; writes results/host_bytes.json

Each row is a process of its own: memory before the model is taken off what it holds after two steps ("held"), and off the
most that it held since the model was there ("peak"). The CPU is the device: harmony's 0.4 GiB of it are included.
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
    return {"parameters": count, "held": status_bytes("VmRSS"), "peak": status_bytes("VmHWM")}


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
        held, peak = (rows[-1][kind] / rows[-1]["parameters"] for kind in ("held", "peak"))
        print(f"{name:<28} held {held:6.2f}, peak {peak:6.2f} bytes a parameter", flush=True)
    write_results("host_bytes", {"rows": rows})


if __name__ == "__main__":
    main()
