"""The paper's machine: GTX 1080 Ti on PCIe 3, and the models' costs on it. Nothing here runs on a device.

Costs per layer come from the profiles that the original published (`benchmarks/vldb22`), where there is one; else from
the roofline estimate (`harmony_ds.profiler.roofline`), which `checks` lays beside published profiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

from common import GIB
from models import Model, bert, gpt2, resnet, vgg

from benchmarks.vldb22 import reference
from benchmarks.vldb22.planner.cuts import fits_all, within
from benchmarks.vldb22.planner.graph import Mode, Schedule, Setup
from benchmarks.vldb22.planner.machine import HARMONY_VLDB22
from benchmarks.vldb22.planner.profile import LayerCost, LayerProfile, PackCosts, PassCosts
from benchmarks.vldb22.planner.search import Answer, Effort, Question, search
from benchmarks.vldb22.planner.simulate import simulate
from harmony_ds.config import Config, load_config
from harmony_ds.estimate.survey import Survey, estimate
from harmony_ds.profiler.hardware import Gpu, Hardware, Host, known_hardware
from harmony_ds.scheduler.partition import uniform_bounds

_Item = TypeVar("_Item")

MACHINE = HARMONY_VLDB22
CAP_BYTES = 10 * GIB
"""The original scheduler's default for a card of 11 GiB."""
SERVER_BYTES = 750 * 10**9
"""Host memory of the server with eight GPUs, by the original's scripts for 10 to 40 billion parameters."""

HARDWARE = Hardware(
    Gpu("gtx1080ti", 11, 11.34, 11.34, 0.177, 484, "pcie3", "xeon-e5", "NVIDIA GeForce GTX 1080 Ti specifications"),
    known_hardware().links["pcie3"],
    Host("xeon-e5", 750, 4, 2400, 18, "18 cores and DDR4 by the original's slides; channels and rate: assumed"),
    known_hardware().typical,
)

UPDATE_MS = {"adam": 1.27e-6, "sgd": 0.4e-6}
"""Per parameter, on one host process of the original: 13.3 s for 10.5 billion (GPT2-10B's profile), and 0.23 s for 578
million (VGG416's)."""

LIGHT = Effort(backward=3, forward=2, jobs=20_000, polished=1, polish_jobs=10_000)
"""A tenth of the default, where many schedules are searched for: an experiment takes minutes."""


def shipped(name: str, devices: int, batch: int, mode: Mode) -> Any:
    """The schedule that the original ships for this, the best one of several; None if there is none at hand."""
    if name in PAPER:
        return None
    cases = [
        case for case in reference.shipped(name.lower().replace("-", "_")) if case.setup == Setup(mode, devices, batch)
    ]
    return min(cases, key=lambda case: case.time_s[1], default=None)


def config(rows: int, accumulation: int, budget_gib: float | None = None) -> Config:
    """Of training in fp32 with AdamW, as the original does; no clipping."""
    harmony: dict[str, Any] = {"device": "cpu"}
    if budget_gib is not None:
        harmony["device_memory_gib"] = budget_gib
    return load_config(
        {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "harmony": harmony,
        }
    )


def survey(model: Model, rows: int, accumulation: int = 1) -> Survey:
    """What the engine would know of the model on this machine, before it trains there."""
    return estimate(model.on_meta(), model.batch(rows, "meta", None), config(rows, accumulation), HARDWARE)


def estimated(model: Model, sizes: Sequence[int], optimizer: str) -> LayerProfile:
    """The roofline's profile in the original's form: layers in call order, then the loss.

    Args:
        sizes: micro-batches; at least two.
        optimizer: "adam" or "sgd" with momentum.
    """
    surveys = {rows: survey(model, rows) for rows in sizes}
    first = surveys[sizes[0]]
    graph, costs = first.graph, first.costs
    inputs = sum(t.numel() * t.element_size() for t in model.batch(sizes[0], "meta", None).values())
    layers, seen = [], set[str]()
    for position, call in enumerate(costs.costs):
        names = [name for name in graph.layer_at(position).parameters if name not in seen]
        seen.update(names)
        elements = sum(graph.parameter(name).numel for name in names)
        given = (inputs if position == 0 else call.stash_bytes + call.stash_again_bytes) // sizes[0]
        states = 2 if optimizer == "adam" else 1
        layers.append(LayerCost(4 * elements, 0, 4 * states * elements, given, UPDATE_MS[optimizer] * elements))
    layers.append(LayerCost(0, 0, 0, costs.tail_bytes // sizes[0] // 3, 0.0))
    tables = [surveys[rows].costs for rows in sizes]
    weights = [layer.weight_bytes for layer in layers]
    forward, backward = [], []
    for table in tables:
        calls = table.costs
        forward.append(
            ([c.forward_ms for c in calls], [c.alive_bytes + c.forward_bytes for c in calls], table.tail_ms / 3)
        )
        backward.append(
            ([c.backward_ms for c in calls], [c.alive_bytes + c.backward_bytes for c in calls], table.tail_ms)
        )
    tails = [table.tail_bytes for table in tables]
    return LayerProfile(
        tuple(layers), _passes(sizes, forward, weights, tails, 1), _passes(sizes, backward, weights, tails, 2)
    )


def _passes(
    sizes: Sequence[int],
    rows: Sequence[tuple[list[float], list[int], float]],
    weights: Sequence[int],
    tails: Sequence[int],
    copies: int,
) -> PassCosts:
    """`copies` of the weights are on the device: in the backward pass, with their gradients, two."""
    return PassCosts(
        tuple(sizes),
        tuple((*times, tail_ms) for times, _, tail_ms in rows),
        tuple(
            (*(peak + copies * weight for peak, weight in zip(peaks, weights[:-1], strict=True)), tail)
            for (_, peaks, _), tail in zip(rows, tails, strict=True)
        ),
    )


def merged(profile: LayerProfile, many: int) -> LayerProfile:
    """`many` neighbours made one layer, the first and the last two left alone: what a pack of them costs is the same."""
    count = len(profile.layers)
    bounds = [0, 1, *range(1 + many, count - 2, many), count - 2, count - 1, count]
    parts = list(pairwise(bounds))
    inputs = [layer.input_bytes for layer in profile.layers]

    def merge(costs: PassCosts) -> PassCosts:
        peaks = []
        for size, row in zip(costs.sizes, costs.peaks_bytes, strict=True):
            peaks.append(tuple(sum(row[a:b]) - size * sum(inputs[a + 1 : b]) for a, b in parts))
        times = tuple(tuple(sum(row[a:b]) for a, b in parts) for row in costs.times_ms)
        return PassCosts(costs.sizes, times, tuple(peaks))

    layers = tuple(
        LayerCost(
            sum(layer.weight_bytes for layer in profile.layers[a:b]),
            sum(layer.buffer_bytes for layer in profile.layers[a:b]),
            sum(layer.optimizer_bytes for layer in profile.layers[a:b]),
            inputs[a],
            sum(layer.update_ms for layer in profile.layers[a:b]),
        )
        for a, b in parts
    )
    return LayerProfile(layers, merge(profile.forward), merge(profile.backward))


def deeper(profile: LayerProfile, copies: Mapping[int, int]) -> LayerProfile:
    """A profile with so many further copies of the layers at some positions."""

    def stretched(row: tuple[_Item, ...]) -> tuple[_Item, ...]:
        return tuple(item for place, item in enumerate(row) for _ in range(1 + copies.get(place, 0)))

    def stretch(costs: PassCosts) -> PassCosts:
        return PassCosts(costs.sizes, tuple(map(stretched, costs.times_ms)), tuple(map(stretched, costs.peaks_bytes)))

    return LayerProfile(stretched(profile.layers), stretch(profile.forward), stretch(profile.backward))


def scaled(profile: LayerProfile, sample_ms: tuple[float, float]) -> LayerProfile:
    """A profile whose largest micro-batch takes so long per sample, forward and backward."""

    def scale(costs: PassCosts, wanted_ms: float) -> PassCosts:
        factor = wanted_ms * costs.sizes[-1] / sum(costs.times_ms[-1])
        return replace(costs, times_ms=tuple(tuple(factor * ms for ms in row) for row in costs.times_ms))

    return replace(
        profile, forward=scale(profile.forward, sample_ms[0]), backward=scale(profile.backward, sample_ms[1])
    )


@dataclass(frozen=True, slots=True)
class Paper:
    """A model of the paper without a published profile at hand.

    Attributes:
        shallow: the model with fewer layers, of which the roofline makes a profile.
        copies: what makes it as deep as the paper's.
        sizes: micro-batches.
        optimizer: "adam" or "sgd".
        sample_ms: forward, and backward with recomputation, of one sample at the largest of `sizes` about, by totals
            of the original's profile (None: not known, so the roofline's are taken).
        merge: neighbours that the search takes as one layer.
        weight_gib: bytes of weights by the original's profile, which the depths have to give.
    """

    shallow: Model
    copies: Mapping[int, int]
    sizes: tuple[int, ...]
    optimizer: str
    sample_ms: tuple[float, float] | None
    merge: int
    weight_gib: float


PAPER = {
    "GPT2-XL": Paper(gpt2(4, 1600, 25, 1024, 50257), {3: 44}, (1, 4), "adam", (645, 1830), 1, 6.102),
    "VGG416": Paper(
        vgg(4, 1, 224, 4096, 1000, "VGG"), dict.fromkeys((2, 8, 15, 22, 29), 76), (1, 16), "sgd", (122, 355), 8, 2.153
    ),
    "ResNet1026": Paper(
        resnet(3, 1, 224, 1000, "ResNet"), dict.fromkeys((3, 6, 9, 12), 125), (1, 32), "sgd", None, 8, 2.987
    ),
}


def published_profile(name: str) -> LayerProfile:
    """Of BERT-Large, BERT-96, GPT2-Medium or GPT2-10B: what the original measured on one of its cards."""
    return reference.profile_of(name.lower().replace("-", "_"))


@cache
def costs_of(name: str, merge: bool = True) -> PackCosts:
    """Of one of the paper's models by its name: by a published profile if there is one.

    `merge`: neighbouring layers of a very deep one are one, as `PAPER` says.
    """
    if name not in PAPER:
        return PackCosts(published_profile(name))
    paper = PAPER[name]
    profile = deeper(estimated(paper.shallow, paper.sizes, paper.optimizer), paper.copies)
    found = sum(layer.weight_bytes for layer in profile.layers) / GIB
    assert abs(found - paper.weight_gib) < 1e-3, (name, found, paper.weight_gib)
    if paper.sample_ms is not None:
        profile = scaled(profile, paper.sample_ms)
    return PackCosts(merged(profile, paper.merge) if merge and paper.merge > 1 else profile)


@dataclass(frozen=True, slots=True)
class Found:
    """The best schedule that the search finds, and what it takes."""

    schedule: Schedule
    seconds: float
    simulated: int


def best(
    costs: PackCosts,
    setup: Setup,
    largest: tuple[int, int],
    effort: Effort = LIGHT,
    cap_bytes: int = CAP_BYTES,
) -> Found:
    """With prefetch and offload overlapped.

    Args:
        largest: micro-batches, forward and backward.
        cap_bytes: device memory of a pack.
    """
    answer: Answer | None = search(Question(setup, True, cap_bytes, *largest), costs, MACHINE, effort)
    if answer is None:
        raise ValueError(f"no schedule fits {cap_bytes:,} bytes")
    return Found(answer.schedule, answer.time_ms / 1000, answer.simulated)


def each_alone(costs: PackCosts, setup: Setup) -> Found:
    """Swapping for each micro-batch, at its best micro-batch size and packs of equal size: data parallel, under the same
    cost model and memory. Groups of one micro-batch follow each other; only the last one's gradients are reduced between
    the devices and updated with.

    This is no baseline of the original's, whose code is not public: it is its own schedule without grouping.
    """
    without, silent, found = WithoutUpdates(costs), replace(MACHINE, peer=float("inf")), []
    for rows in (size for size in range(1, setup.share(0) + 1) if setup.share(0) % size == 0):
        one = Setup(Mode.DATA_PARALLEL, setup.devices, setup.devices * rows)
        for schedule in _even(costs, rows):
            alone = simulate(one, schedule, without, silent, overlap=True).time_ms
            last = simulate(one, schedule, costs, MACHINE, overlap=True).time_ms
            found.append(Found(schedule, ((setup.share(0) // rows - 1) * alone + last) / 1000, len(found)))
    return min(found, key=lambda one: one.seconds)


def _even(costs: PackCosts, rows: int) -> Iterator[Schedule]:
    """Packs of every equal size that fit."""
    for layers in range(1, costs.count + 1):
        bounds = uniform_bounds(costs.count, layers)
        if not fits_all(bounds, within(costs.memory(True, rows), CAP_BYTES)):
            return
        yield Schedule(rows, bounds[:-1], rows, bounds)


class WithoutUpdates(PackCosts):
    """The same costs, but nothing is updated."""

    def __init__(self, costs: PackCosts) -> None:
        for name, value in vars(costs).items():
            setattr(self, name, value)

    def update_ms(self, first: int, last: int) -> float:
        return 0.0


def checks() -> dict[str, dict[str, float]]:
    """The roofline, not scaled, over what the original measured: of one sample, forward, and backward with recomputation.

    In micro-batches of four where a profile is published, else over the published totals of `PAPER`.
    """
    found = {}
    for name, shallow in (
        ("BERT-Large", bert(4, 1024, 16, 512, 30522)),
        ("GPT2-Medium", gpt2(4, 1024, 16, 1024, 50257)),
    ):
        profile, known = estimated(shallow, (2, 4), "adam"), PackCosts(published_profile(name))
        costs = PackCosts(deeper(profile, {_block(profile): 20}))
        forward, backward = known.forward_ms(4, 0, known.count), known.backward_ms(4, 0, known.count)
        found[name] = _over(costs, 4, (forward / 4, backward / 4))
    for name, paper in PAPER.items():
        if paper.sample_ms is not None:
            profile = deeper(estimated(paper.shallow, paper.sizes, paper.optimizer), paper.copies)
            found[name] = _over(PackCosts(profile), paper.sizes[-1], paper.sample_ms)
    return found


def _over(costs: PackCosts, rows: int, sample_ms: tuple[float, float]) -> dict[str, float]:
    return {
        "forward": costs.forward_ms(rows, 0, costs.count) / rows / sample_ms[0],
        "backward": costs.backward_ms(rows, 0, costs.count) / rows / sample_ms[1],
    }


def _block(profile: LayerProfile) -> int:
    """The last of the equal layers."""
    sizes = [layer.weight_bytes for layer in profile.layers]
    often = max(sizes, key=sizes.count)
    return len(sizes) - 1 - sizes[::-1].index(often)
