"""`harmony-ds machines`: list the machines that `estimate --machine` knows, with the sources of their numbers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from harmony_ds.estimate.text import columns, wrapped
from harmony_ds.profiling.hardware import known_hardware

_COLUMNS = {
    "gpus": {
        "GPU": "name", "GiB": "memory_gib", "TF fp32": "fp32_tflops", "bf16": "half_tflops",
        "GB/s": "memory_gb_per_s", "peers": "peer_gb_per_s", "link": "link", "host": "host",
    },
    "links": {"link": "name", "GB/s": "nominal_gb_per_s", "achieved": "one_way_gb_per_s",
        "both ways": "both_ways_gb_per_s"},
    "hosts": {"host": "name", "GiB": "memory_gib", "GB/s": "nominal_gb_per_s", "cores": "cores"},
}  # fmt: skip


def command(args: argparse.Namespace) -> int:
    known = known_hardware()
    if args.json:
        print(json.dumps(asdict(known), indent=1))
        return 0
    for kind, titles in _COLUMNS.items():
        rows: Mapping[str, Any] = getattr(known, kind)
        print(columns(list(titles), [[_cell(getattr(one, name)) for name in titles.values()] for one in rows.values()]))
        print(*("", *(wrapped(f"  {one.name}: {one.source}", "    ") for one in rows.values()), ""), sep="\n")
    return 0


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
