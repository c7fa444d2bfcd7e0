r"""How many bytes does torch's allocator have to reserve for what a plan allocates?

    python -m benchmarks.allocator --model benchmarks/models/llama-3b.json --rows 3 --accumulation 7 --sequence 1536 \
        --cap-gib 17 [--ragged] [--clip 1] [--harmony JSON] [--pools engine|weights-apart] --json
    python -m benchmarks.allocator [--write]    # all cases: an hour; --write: results/allocator.json and docs/memory.md

The engine trains three steps on torch's meta device, with its real sizes and streams (`recorder.py`). What it allocates is
replayed in the model of torch's allocator (caching_allocator.py), for the third step:

    reserved_peak_bytes          the most that the allocator reserved, where it may reserve the budget
    reserved_without_cap_bytes   the same, where it may reserve any number of bytes
    retries_a_step               how often it gave everything back that was free, waited for the device, and tried again
    planned_peak_bytes           the most that the plan says is in use
    set_aside_bytes              the part of the budget that the plan must not use
    times_replanned              how often the engine then plans for a 32nd of the budget less, until no step tries again;
                                 retries_when_replanned and predicted_step_ms_when_replanned are of the last of these plans
    out_of_memory                whether a step would have ended so; `failure` says which one

No GPU is used. Times are predicted, for an H200.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.allocator.case import Case, answer_with_replanning
from benchmarks.allocator.replay import Pools
from benchmarks.allocator.table import write_table
from benchmarks.common import GIB, quiet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a configuration of transformers; without one: all cases")
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--cap-gib", type=float, default=24.0, help="the budget of device memory")
    parser.add_argument("--ragged", action="store_true", help="micro-batches of 50 to 100 %% of the tokens")
    parser.add_argument("--clip", type=float, default=0.0, help="clip gradients to this norm")
    parser.add_argument("--harmony", type=json.loads, default={}, help='more of the ds_config\'s "harmony", as JSON')
    parser.add_argument("--pools", choices=[pools.value for pools in Pools], default=Pools.ENGINE.value)
    parser.add_argument("--fixed", action="store_true", help="fixed segments, not expandable ones")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help="of all cases: write the results and the table")
    options = parser.parse_args()
    quiet()
    pools, expandable = Pools(options.pools), not options.fixed
    if options.model is None:
        write_table(pools, expandable, options.write)
        return
    case = Case(
        options.model,
        options.rows,
        options.accumulation,
        options.sequence,
        options.cap_gib,
        options.ragged,
        options.clip,
        options.harmony,
    )
    found = answer_with_replanning(case, pools, expandable)
    print(json.dumps(found, indent=1) if options.json else _in_words(found))


def _in_words(found: dict[str, Any]) -> str:
    gib = {name: f"{nbytes / GIB:.2f}" for name, nbytes in found.items() if name.endswith("_bytes")}
    end = f"OUT OF MEMORY {found['failure']}\n" if found["out_of_memory"] else ""
    return (
        f"{found['case']}\n{end}reserved {gib['reserved_peak_bytes']} GiB of {gib['budget_bytes']} (without a cap "
        f"{gib['reserved_without_cap_bytes']}), {found['retries_a_step']} retries a step; planned "
        f"{gib['planned_peak_bytes']}, set aside {gib['set_aside_bytes']}; {found['predicted_step_ms']:,.0f} ms predicted\n"
        f"{found['plan']}"
    )


if __name__ == "__main__":
    main()
