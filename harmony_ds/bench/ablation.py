"""Worth of every mechanism: harmony as it is, and with each one switched off."""

from __future__ import annotations

from dataclasses import replace

from harmony_ds.bench.results import Contestant, Results
from harmony_ds.bench.workload import Workload
from harmony_ds.config.ablations import ABLATIONS, Ablation

AS_IT_IS = "harmony"


def ablated(task: Workload) -> list[Contestant]:
    """Return harmony as it is, then with every switch of `ABLATIONS` that can make a difference here."""
    switched = [
        Contestant(_label(ablation), "harmony", replace(task, ds_config=ablation.applied(task.ds_config)))
        for ablation in ABLATIONS
        if ablation.applies_to(task.ds_config, task.device)
    ]
    return [Contestant(AS_IT_IS, "harmony", task), *switched]


def _label(ablation: Ablation) -> str:
    return f"{'with' if ablation.is_choice else 'without'} {ablation.name}"


def equal_results(results: Results) -> dict[str, bool]:
    """Return by contestant whether its losses are harmony's, bit for bit; without those that may round differently."""
    device, expected = results.rows[AS_IT_IS].task["device"], results.rows[AS_IT_IS].losses
    rounded = {_label(ablation) for ablation in ABLATIONS if not ablation.exact_on(device)}
    return {
        label: row.error is None and row.losses == expected[: len(row.losses)]
        for label, row in results.rows.items()
        if label not in rounded
    }
