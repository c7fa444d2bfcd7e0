"""Fig. 12: what is swapped. Bytes by kind, of a step that swaps for all micro-batches at once and of one for each.

python benchmarks/paper/fig12.py [--quick]
"""

from __future__ import annotations

from typing import Any

from common import GIB, MEASURED, MIB, NAIVE, OURS, SIMULATED, Content, Experiment, Options, panels
from matplotlib.figure import Figure
from models import Model, gpt2
from training import Ours, adamw

KINDS = ("weights", "gradients", "activations", "data")
_HARMONY = {"pack_layers": 1, "stash": "host"}
SAMPLES, DEVICES = (16, 64, 256), 4


def run(options: Options) -> Content:
    model = gpt2(4 if options.quick else 12, 64 if options.quick else 128, 4, 32, 512)
    groups = (1, 4) if options.quick else (1, 2, 4, 8, 16, 32)
    rows = [_measured(model, group) for group in groups]
    return {
        "model": model.name,
        "parameters": sum(p.numel() for p in model.on_meta().parameters()),
        "packs": "one layer each, stash on the host",
        "measured": rows,
        "simulated": [] if options.quick else _simulated(),
    }


def _measured(model: Model, group: int) -> Content:
    """Counted in the ledger: one group of so many micro-batches; so many groups of one, whose ledgers are added up."""
    grouped = Ours(model.seeded(), adamw, (1, group), None, _HARMONY)
    grouped.step(model.batches(1, group))
    grouped.step(model.batches(1, group))
    together = grouped.engine.swap_report()
    grouped.close()
    single = Ours(model.seeded(), adamw, (1, 1), None, _HARMONY)
    single.step(model.batches(1, 1))
    alone = dict.fromkeys(KINDS, 0)
    for batch in model.batches(1, group):
        single.step([batch])
        report = single.engine.swap_report()
        for kind in KINDS:
            alone[kind] += report.host_to_device[kind] + report.device_to_host[kind]
    single.close()
    return {
        "micro_batches": group,
        "grouped": {kind: together.host_to_device[kind] + together.device_to_host[kind] for kind in KINDS},
        "each_alone": alone,
        "lower_bound": together.lower_bound_bytes,
        "zero3_offload_formula": together.zero3_offload_bytes,
    }


def _simulated() -> list[Content]:
    """GPT2-XL on four devices: bytes of the task graphs, and of swapping for each micro-batch by formula."""
    from machine import best, costs_of

    from benchmarks.vldb22.planner.compose import compose
    from benchmarks.vldb22.planner.graph import Mode, Setup
    from benchmarks.vldb22.planner.volumes import count_volumes

    costs = costs_of("GPT2-XL")
    weights = costs.state_bytes(0, costs.count)
    found: list[Content] = []
    for samples in SAMPLES:
        row: dict[str, Any] = {"samples": samples, "weights": weights}
        for mode in Mode:
            setup = Setup(mode, DEVICES, samples)
            schedule = best(costs, setup, (4, 4)).schedule
            volumes = count_volumes(compose(setup, schedule), costs)
            row[mode.value] = {
                "schedule": str(schedule),
                "weights": volumes.weights_in,
                "gradients": volumes.weight_gradients_out,
                "activations": volumes.swapped - volumes.weights_in - volumes.weight_gradients_out,
                "peer": volumes.peer,
            }
        # Data parallel over virtualised memory: weights in and out in both passes of each micro-batch of each device,
        # and once more for the update.
        row["each_alone_formula"] = (4 * samples // DEVICES + 2) * DEVICES * weights
        found.append(row)
    return found


def draw(content: Content) -> Figure:
    titles = [f"{MEASURED}: {content['model']}, fp32"]
    if content["simulated"]:
        titles.append(f"{SIMULATED}: GPT2-XL, 4 devices")
    figure, axes = panels(*titles)
    _draw_measured(axes[0], content["measured"])
    if content["simulated"]:
        _draw_simulated(axes[1], content["simulated"])
    return figure


def _draw_measured(axes: Any, rows: list[Content]) -> None:
    groups = [row["micro_batches"] for row in rows]

    def moved(row: Content, name: str) -> float:
        return (row[name]["weights"] + row[name]["gradients"]) / MIB

    axes.plot(
        groups, [row["zero3_offload_formula"] / MIB for row in rows], "^:", color=NAIVE, label="ZeRO-3 offload, formula"
    )
    axes.plot(
        groups, [moved(row, "each_alone") for row in rows], "s--", color=NAIVE, label="each micro-batch alone, counted"
    )
    axes.plot(
        groups,
        [moved(row, "grouped") for row in rows],
        "o-",
        color=OURS,
        label="weights and gradients, grouped, counted",
    )
    activations = [row["grouped"]["activations"] / MIB for row in rows]
    axes.plot(groups, activations, "o:", color=OURS, alpha=0.5, label="activations, grouped, counted")
    axes.set(xlabel="micro-batches in a step", ylabel="swapped per step, MiB", xscale="log", yscale="log")
    axes.set_ylim(bottom=activations[0] / 30)
    axes.set_xticks(groups, [str(group) for group in groups])
    axes.minorticks_off()
    axes.legend(loc="lower right")


def _draw_simulated(axes: Any, rows: list[Content]) -> None:
    samples = [row["samples"] for row in rows]
    naive = [row["each_alone_formula"] / GIB for row in rows]
    axes.plot(samples, naive, "s--", color=NAIVE, label="weights and gradients, each sample alone, formula")
    for mode, line, alpha in (("vDP", "o--", 0.6), ("vPP", "o-", 1.0)):
        moved = [(row[mode]["weights"] + row[mode]["gradients"]) / GIB for row in rows]
        axes.plot(samples, moved, line, color=OURS, alpha=alpha, label=f"weights and gradients, {mode}")
        activations = [row[mode]["activations"] / GIB for row in rows]
        axes.plot(samples, activations, "o:", color=OURS, alpha=alpha / 2, label=f"activations, {mode}")
    axes.set(ylabel="swapped per step, all devices, GiB", xlabel="samples in a step", xscale="log", yscale="log")
    axes.set_ylim(0.3, 2e6)
    axes.set_xticks(samples, [str(one) for one in samples])
    axes.minorticks_off()
    axes.legend(loc="upper left")


def says(content: Content) -> str:
    rows = content["measured"]
    last = rows[-1]
    swapped = [row["grouped"]["weights"] + row["grouped"]["gradients"] for row in rows]
    alone = last["each_alone"]["weights"] + last["each_alone"]["gradients"]
    text = (
        f"Measured (counted in the ledger): weights and gradients take {swapped[-1] / MIB:.1f} MiB per step, the lower "
        f"bound of the formula, with {rows[0]['micro_batches']} to {last['micro_batches']} micro-batches alike "
        f"({'equal byte for byte' if set(swapped) == {last['lower_bound']} else 'NOT equal'}); the same engine in groups "
        f"of one moves {alone / swapped[-1]:.1f} times as much at {last['micro_batches']}, and ZeRO-3 offload by its "
        f"formula {last['zero3_offload_formula'] / swapped[-1]:.1f} times. Activations grow with the micro-batches, as "
        "they must."
    )
    if content["simulated"]:
        middle = content["simulated"][1]
        total = sum(middle["vPP"][kind] for kind in ("weights", "gradients", "activations"))
        text += (
            f" Simulated: GPT2-XL, {middle['samples']} samples on {DEVICES} devices: the pipeline swaps "
            f"{total / GIB:.0f} GiB a step over all devices, data parallel swapping for each sample (formula) "
            f"{middle['each_alone_formula'] / GIB:,.0f} GiB, {middle['each_alone_formula'] / total:.0f} times as much."
        )
    return text


EXPERIMENT = Experiment("fig12", "Fig. 12: what is swapped", run, draw, says)

if __name__ == "__main__":
    EXPERIMENT.main()
