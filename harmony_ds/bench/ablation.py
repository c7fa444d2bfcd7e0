"""Compare harmony_ds as it is with itself, each of its mechanisms switched off in turn."""

from __future__ import annotations

from dataclasses import replace

from harmony_ds.bench.results import Results, Row
from harmony_ds.bench.workload import Workload
from harmony_ds.config.ablations import ABLATIONS

AS_IT_IS = "harmony"


def ablated(task: Workload) -> dict[str, Row]:
    """Return harmony as it is, then with every switch of `ABLATIONS` that can make a difference here, by label."""
    switched = {
        one.name: Row("harmony", replace(task, ds_config=one.applied(task.ds_config)))
        for one in ABLATIONS
        if one.device in ("", task.device)
    }
    return {AS_IT_IS: Row("harmony", task), **switched}


def differing(results: Results) -> list[str]:
    """Return the labels of rows whose losses are not harmony's, bit for bit, except rows that may round differently."""
    ours = results.rows[AS_IT_IS]
    rounding = {one.name for one in ABLATIONS if one.rounds_on_cuda and ours.task.device == "cuda"}
    return [
        label
        for label, row in results.rows.items()
        if label not in rounding and (row.error is not None or row.losses != ours.losses[: len(row.losses)])
    ]
