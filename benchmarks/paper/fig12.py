"""Fig. 12: what is swapped. Bytes by kind, of a step that swaps for all micro-batches at once and of one for each.

python benchmarks/paper/fig12.py [--quick]
"""

from __future__ import annotations

from matplotlib.figure import Figure
from models import Model, gpt2
from runner import MIB, NAIVE, OURS, Content, Options, main, panels

from benchmarks.training import Ours, adamw

TITLE = "Fig. 12: what is swapped"
PAPER = "GPT2-XL, four GTX 1080 Ti; swaps fall by up to two orders of magnitude."
KINDS = ("weights", "gradients", "activations", "data")
_HARMONY = {"pack_layers": 1, "stash": "host"}


def run(options: Options) -> Content:
    model = gpt2(4 if options.quick else 12, 64 if options.quick else 128, 4, 32, 512)
    groups = (1, 4) if options.quick else (1, 2, 4, 8, 16, 32)
    return {"model": model.name, "measured": [counted(model, group) for group in groups]}


def counted(model: Model, group: int) -> Content:
    """Return the bytes of one group of so many micro-batches, and of so many groups of one."""
    grouped = Ours(model.seeded(), adamw, (1, group), None, _HARMONY)
    for _ in range(2):
        grouped.step(model.batches(1, group))
    together = grouped.engine.swap_report()
    grouped.close()
    single = Ours(model.seeded(), adamw, (1, 1), None, _HARMONY)
    single.step(model.batches(1, 1))
    alone = dict.fromkeys(KINDS, 0)
    for batch in model.batches(1, group):
        single.step([batch])
        report = single.engine.swap_report()
        alone = {kind: alone[kind] + report.host_to_device[kind] + report.device_to_host[kind] for kind in KINDS}
    single.close()
    return {
        "micro_batches": group,
        "grouped": {kind: together.host_to_device[kind] + together.device_to_host[kind] for kind in KINDS},
        "each_alone": alone,
        "lower_bound": together.lower_bound_bytes,
        "zero3_offload_formula": together.zero3_offload_bytes,
    }


def swapped(row: Content, name: str) -> float:
    """Return weights and gradients."""
    return float(row[name]["weights"] + row[name]["gradients"])


def draw(content: Content) -> Figure:
    rows = content["measured"]
    figure, (axes,) = panels(f"MEASURED: {content['model']}, fp32")
    groups = [row["micro_batches"] for row in rows]
    formula = [row["zero3_offload_formula"] / MIB for row in rows]
    axes.plot(groups, formula, "^:", color=NAIVE, label="ZeRO-3 offload, formula")
    for name, form, colour, label in (
        ("each_alone", "s--", NAIVE, "each micro-batch alone, counted"),
        ("grouped", "o-", OURS, "weights and gradients, grouped, counted"),
    ):
        axes.plot(groups, [swapped(row, name) / MIB for row in rows], form, color=colour, label=label)
    activations = [row["grouped"]["activations"] / MIB for row in rows]
    axes.plot(groups, activations, "o:", color=OURS, alpha=0.5, label="activations, grouped, counted")
    axes.set(xlabel="micro-batches in a step", ylabel="swapped per step, MiB", xscale="log", yscale="log")
    axes.set_ylim(bottom=activations[0] / 30)
    axes.set_xticks(groups, list(map(str, groups)))
    axes.minorticks_off()
    axes.legend(loc="lower right")
    return figure


def says(content: Content) -> str:
    rows = content["measured"]
    last, grouped = rows[-1], [swapped(row, "grouped") for row in rows]
    alike = "equal byte for byte" if set(grouped) == {last["lower_bound"]} else "NOT equal"
    return (
        f"Counted in the ledger: weights and gradients take {grouped[-1] / MIB:.1f} MiB a step, the lower bound of the "
        f"formula, with {rows[0]['micro_batches']} to {last['micro_batches']} micro-batches ({alike}); groups of one move "
        f"{swapped(last, 'each_alone') / grouped[-1]:.1f} times as much at {last['micro_batches']}, and ZeRO-3 offload by "
        f"its formula {last['zero3_offload_formula'] / grouped[-1]:.1f} times."
    )


if __name__ == "__main__":
    main(__file__)
