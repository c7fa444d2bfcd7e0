"""Fig. 17 and 18: to the limit of host memory: models grow, the device stays, and more devices share one host.

python benchmarks/paper/fig17.py [--quick] [--rounds 3]
"""

from __future__ import annotations

import statistics
from typing import Any

from common import GIB, MEASURED, MIB, NAIVE, OURS, PLAIN, SIMULATED, Content, Experiment, Options, panels
from machine import MACHINE, SERVER_BYTES, deeper, published_profile, reference, survey
from matplotlib.figure import Figure
from models import Model, gpt2
from training import Ours, adamw, interleaved, planned_bytes

from benchmarks.vldb22.planner.graph import Mode, Schedule, Setup
from benchmarks.vldb22.planner.profile import LayerProfile, PackCosts
from benchmarks.vldb22.planner.simulate import simulate
from harmony_ds.estimate.forecast import Situation, forecast
from harmony_ds.profiler.hardware import UpdateCost
from harmony_ds.scheduler.partition import uniform_bounds

LAYERS = (4, 8, 16, 32, 64)
ROWS, GROUP = 1, 2
BILLIONS = (10, 20, 30, 40)
BLOCKS = 5
"""Per billion parameters, of hidden size 4,096."""
SAMPLES, PACK = 32, 2
DEVICES = (1, 2, 4, 8)


def run(options: Options) -> Content:
    layers = (4, 8) if options.quick else LAYERS
    return {
        "measured": _measured(layers, 64 if options.quick else 128, options.rounds),
        "simulated": [] if options.quick else _simulated(),
        "one_device": [] if options.quick else [_one_device(billions) for billions in (BILLIONS[0], BILLIONS[-1])],
        "server_bytes": SERVER_BYTES,
    }


def _measured(layers: tuple[int, ...], hidden: int, rounds: int) -> Content:
    """One device budget, that of the deepest model's smallest plan, for models of all depths."""
    models = [gpt2(count, hidden, 4, 32, 512) for count in layers]
    budget = planned_bytes(models[-1].seeded(), adamw, models[-1].batches(ROWS, GROUP), ROWS)
    rows: list[Content] = []
    for count, model in zip(layers, models, strict=True):
        rows.append(_grown(model, budget, rounds) | {"layers": count})
    return {"hidden": hidden, "budget_bytes": budget, "micro_batches": GROUP, "rows": rows}


def _grown(model: Model, budget: int, rounds: int) -> Content:
    batches = model.batches(ROWS, GROUP)
    run = Ours(model.seeded(), adamw, (ROWS, GROUP), budget, {"stash": "host"})
    seconds = interleaved({"step": lambda: run.step(batches)}, rounds)["step"]
    memory, parameters = run.engine.memory_report(), sum(p.numel() for p in run.model.parameters())
    run.close()
    return {
        "parameters": parameters,
        "state_bytes": 16 * parameters,
        "device_peak_bytes": memory.device_peak_bytes,
        "host_bytes": dict(memory.host_bytes),
        "host_bytes_per_parameter": sum(memory.host_bytes.values()) / parameters,
        "step_s": statistics.median(seconds),
    }


def _profile(billions: int) -> LayerProfile:
    """The published profile of 10 billion parameters, with more of its equal blocks."""
    return deeper(published_profile("GPT2-10B"), {3: BLOCKS * (billions - BILLIONS[0])})


def _simulated() -> list[Content]:
    """The original's packs of two layers and micro-batches of one."""
    known = {
        (c.setup.mode, c.setup.devices): c.time_s[1] for c in reference.shipped("gpt2_10b") if c.setup.batch == SAMPLES
    }
    rows: list[Content] = []
    for billions in BILLIONS:
        costs = PackCosts(_profile(billions))
        bounds = uniform_bounds(costs.count, PACK)
        schedule = Schedule(1, bounds[:-1], 1, bounds)
        row: dict[str, Any] = {"billions": billions, "host_bytes": _host_bytes(billions)}
        for mode in Mode:
            for devices in DEVICES:
                setup = Setup(mode, devices, SAMPLES)
                time_ms = simulate(setup, schedule, costs, MACHINE, overlap=True).time_ms
                cell: Content = {"s": time_ms / 1000}
                if billions == BILLIONS[0]:
                    cell["published_s"] = known.get((mode, devices))
                row[f"{mode.value} {devices}"] = cell
        rows.append(row)
    return rows


def _host_bytes(billions: int) -> Content:
    """Weights, gradients and optimizer state in fp32, by the profile: what the original keeps in shared host memory."""
    layers = _profile(billions).layers
    weights, optimizer = sum(one.weight_bytes for one in layers), sum(one.optimizer_bytes for one in layers)
    return {"weights": weights, "gradients": weights, "optimizer": optimizer}


def _one_device(billions: int) -> Content:
    """This engine's own plan for one of those cards: estimated costs, its own search and simulator."""
    model = gpt2(BLOCKS * billions, 4096, 32, 1024, 50257, f"GPT2-{billions}B")
    found = forecast(
        Situation(survey(model, 1, SAMPLES), update=UpdateCost(2, 4, 2), host_budget_bytes=SERVER_BYTES, items=1)
    )
    return {
        "billions": billions,
        "s": found.prediction.step_ms / 1000,
        "device_peak_bytes": found.plan.peak_bytes,
        "device_budget_bytes": found.device_budget_bytes,
        "host_bytes": dict(found.host_bytes),
        "busy_share": dict(found.busy_share),
        "packs": len(found.plan.packing.backward),
    }


def draw(content: Content) -> Figure:
    titles = [f"{MEASURED}: GPT-2 grows, the device does not"]
    if content["simulated"]:
        titles += [f"{SIMULATED}: host memory", f"{SIMULATED}: D = {SAMPLES}"]
    figure, axes = panels(*titles, width=4.0)
    _draw_measured(axes[0], content["measured"])
    if content["simulated"]:
        _draw_host(axes[1], content)
        _draw_time(axes[2], content)
    return figure


def _draw_measured(axes: Any, part: Content) -> None:
    rows = part["rows"]
    millions = [row["parameters"] / 1e6 for row in rows]
    axes.plot(millions, [row["state_bytes"] / MIB for row in rows], ":", color=PLAIN, label="16 bytes per parameter")
    axes.plot(
        millions, [sum(row["host_bytes"].values()) / MIB for row in rows], "o-", color=NAIVE, label="host, counted"
    )
    axes.plot(millions, [row["device_peak_bytes"] / MIB for row in rows], "o-", color=OURS, label="device peak")
    axes.axhline(part["budget_bytes"] / MIB, color=OURS, linestyle="--", linewidth=0.8, label="device budget")
    axes.set(xlabel="million parameters", ylabel="MiB", xscale="log", yscale="log")
    axes.legend()


def _draw_host(axes: Any, content: Content) -> None:
    rows = content["simulated"]
    bottom = [0.0] * len(rows)
    for kind, colour in (("weights", OURS), ("gradients", "#6fa3d8"), ("optimizer", "#bcd4ec")):
        heights = [row["host_bytes"][kind] / GIB for row in rows]
        axes.bar(range(len(rows)), heights, 0.5, bottom=bottom, color=colour, label=kind)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.axhline(content["server_bytes"] / GIB, color=PLAIN, linestyle="--", linewidth=1, label="the server's memory")
    axes.set(xlabel="billion parameters", ylabel="host memory, GiB", ylim=(0, 1000))
    axes.set_xticks(range(len(rows)), [str(row["billions"]) for row in rows])
    axes.legend(loc="upper left", ncols=2)


def _draw_time(axes: Any, content: Content) -> None:
    first = content["simulated"][0]
    for row in content["simulated"]:
        for mode, line, colour in (("vPP", "o-", OURS), ("vDP", "s--", NAIVE)):
            speeds = [SAMPLES / row[f"{mode} {devices}"]["s"] for devices in DEVICES]
            label = {"vPP": "pipeline (vPP)", "vDP": "data parallel (vDP)"}[mode] if row is first else None
            axes.plot(DEVICES, speeds, line, color=colour, label=label)
        axes.text(0.93, SAMPLES / row["vPP 1"]["s"], f"{row['billions']}B", fontsize=7, va="center", ha="right")
    known = [(d, mode) for d in DEVICES for mode in ("vPP", "vDP") if first[f"{mode} {d}"]["published_s"]]
    speeds = [SAMPLES / first[f"{mode} {d}"]["published_s"] for d, mode in known]
    axes.plot([d for d, _ in known], speeds, "x", color="black", markersize=6, label="10B, the original's estimate")
    axes.set(xlabel="devices", ylabel="samples per second (estimate)", yscale="log", xscale="log", xlim=(0.78, 9))
    axes.set_xticks(DEVICES, [str(d) for d in DEVICES])
    axes.set_yticks((0.02, 0.05, 0.1, 0.2, 0.5), ("0.02", "0.05", "0.1", "0.2", "0.5"))
    axes.minorticks_off()
    axes.legend(loc="upper left")
    axes.set_ylim(top=1.0)


def says(content: Content) -> str:
    rows = content["measured"]["rows"]
    first, last = rows[0], rows[-1]
    text = (
        f"Measured: GPT-2 from {first['parameters'] / 1e6:.1f} to {last['parameters'] / 1e6:.1f} million parameters under "
        f"one device budget of {content['measured']['budget_bytes'] / MIB:.2f} MiB: training state grows from "
        f"{first['state_bytes'] / MIB:.0f} to {last['state_bytes'] / MIB:.0f} MiB, and the peak never exceeds the budget "
        f"(at most {max(row['device_peak_bytes'] for row in rows) / MIB:.2f}); the host holds "
        f"{last['host_bytes_per_parameter']:.1f} bytes per parameter at the largest: "
        "weights and moments 12, and gradients only of the packs that are under way."
    )
    if content["simulated"]:
        small, large = content["simulated"][0], content["simulated"][-1]
        error = max(
            abs(cell["s"] / cell["published_s"] - 1)
            for key, cell in small.items()
            if isinstance(cell, dict) and cell.get("published_s")
        )
        text += (
            f" Simulated, the original's packs: 10 billion parameters come out within {100 * error:.2f} % of its own "
            f"estimates; {large['billions']} billion need {sum(large['host_bytes'].values()) / GIB:.0f} GiB of the host's "
            f"{content['server_bytes'] / GIB:.0f}, and one to eight devices are {_gain(large, 'vPP'):.1f} times as fast as "
            f"a pipeline, {_gain(large, 'vDP'):.1f} data parallel. This engine's own plan for one of these cards "
            f"(its own search, a roofline's times) holds "
            f"{sum(content['one_device'][-1]['host_bytes'].values()) / GIB:.0f} GiB on the host, stash included."
        )
    return text


def _gain(row: Content, mode: str) -> float:
    return float(row[f"{mode} 1"]["s"] / row[f"{mode} 8"]["s"])


EXPERIMENT = Experiment("fig17", "Fig. 17 and 18: to the limit of host memory", run, draw, says)

if __name__ == "__main__":
    EXPERIMENT.main()
