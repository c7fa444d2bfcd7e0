"""Several processes train to the bits of plain PyTorch, with gradients added up in the order of the ranks."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.distributed.processes import run
from tests.distributed.training import Training, differences, train_all, train_plainly

SHARE = {"weights": "share"}
DISKS = ("offload_optimizer", "offload_param")
BITWISE = (
    Training(),
    Training(loop="familiar", clip=0.05),
    Training(optimizer="SGD"),
    Training(optimizer="Adagrad", clip=0.01),
    Training(model="experts"),
    Training(model="experts", clip=0.01, optimizer="SGD", accumulation=1),
    Training(bf16=True),
    Training(bf16=True, clip=0.05, loop="familiar"),
    Training(harmony={"grouping": False}, clip=0.05, accumulation=1),
    Training(harmony={"prefetch": False}),
    Training(harmony={"stash": "host"}, clip=0.05, accumulation=3),
    Training(harmony={"pack_layers": None, "device_memory_gib": 0.001}, clip=0.05),
    Training(model="llama", steps=2),
    Training(model="llama", bf16=True, clip=0.05, steps=2),
    Training(model="llama", bf16=True, steps=2, loop="familiar", harmony=SHARE),
    Training(model="llama", steps=2, clip=0.05, harmony={**SHARE, "pack_layers": None, "device_memory_gib": 0.02}),
    Training(loop="one looks", harmony=SHARE),
    Training(loop="freezes", clip=0.05),
    Training(harmony={**SHARE, "grouping": False}, accumulation=1),
    Training(model="experts", clip=0.01, harmony={**SHARE, "stash": "host", "prefetch": False}),
    # Each process drives several devices.
    Training(bf16=True, clip=0.05, loop="familiar", harmony={"devices": 3}),
    Training(model="llama", steps=2, clip=0.05, harmony={**SHARE, "devices": 2, "pack_layers": 1}),
    Training(clip=0.05, harmony={"devices": 2, "pack_layers": 1}),
    Training(bf16=True, clip=0.05, harmony={"split_masters": True}),
    Training(model="llama", bf16=True, steps=2, harmony={"split_masters": True}, loop="familiar"),
    Training(bf16=True, disk=DISKS[:1], optimizer="SGD"),
    Training(disk=DISKS[1:], clip=0.05),
    Training(model="llama", bf16=True, clip=0.05, steps=2, disk=DISKS, harmony=SHARE),
)
# With one layer a pack, and one micro-batch a step, a process may have no gradient at all in a pack, and others have some.
WITHOUT_GRADIENT = tuple(
    Training(
        model=model, clip=clip, steps=5, accumulation=1, bf16=True, bf16_sums=bf16_sums, harmony={"pack_layers": 1}
    )
    for model in ("experts", "layerdrop")
    for clip in (0.0, 0.05)
    for bf16_sums in (True, False)
)
JOINED = {"micro_batch": {"forward": 12, "backward": 6}, "pack_layers": 1}
CLOSE = (
    # Processes, and micro-batches of one, join unlike numbers of calls.
    Training(model="ragged", optimizer="SGD", clip=0.05, accumulation=4, harmony=JOINED),
    Training(model="ragged", optimizer="SGD", accumulation=4, harmony={"micro_batch": "auto", "pack_layers": 1}),
    Training(model="ragged", optimizer="SGD", accumulation=4, harmony={**JOINED, **SHARE}),
    Training(model="ragged", optimizer="SGD", clip=0.05, accumulation=4, harmony={**JOINED, "devices": 2}),
    Training(harmony={"reproducible": False}, clip=0.05),
    # DeepSpeed's op takes powers of the betas otherwise for the first parameter that it steps than for the others.
    Training(optimizer="DeepSpeedCPUAdam"),
    Training(optimizer="DeepSpeedCPUAdam", bf16=True, clip=0.05),
    Training(optimizer="DeepSpeedCPUAdam", bf16=True, clip=0.05, harmony={"split_masters": True}),
    Training(optimizer="DeepSpeedCPUAdam", bf16=True, clip=0.05, disk=DISKS),
    # Its embeddings are tied: their gradient comes from two packs, and its additions are regrouped.
    Training(model="gpt2", clip=0.05, steps=2, optimizer="SGD"),
)


def _at_random(seed: int) -> Training:
    """Return an unusual plan."""
    chance = random.Random(seed)
    layers = chance.choice([None, 1, 2, 3])
    harmony = {
        "grouping": chance.random() < 0.8,
        "prefetch": chance.random() < 0.5,
        "gradient_slabs": chance.choice([1, 2, 3]),
        "stash": chance.choice(["auto", "device", "host"]),
        "weights": chance.choice(["whole", "share"]),
        "reduce": chance.choice(["device", "host"]),
        "pack_layers": layers,
        "device_memory_gib": chance.choice([0.0008, 0.002, 0.01]) if layers is None else None,
    }
    return Training(
        model=chance.choice(["mlp", "mlp", "experts"]),
        optimizer=chance.choice(["AdamW", "SGD", "Adagrad"]),
        clip=chance.choice([0.0, 0.01]),
        accumulation=chance.choice([1, 2, 5]) if harmony["grouping"] else 1,
        steps=2,
        bf16=chance.random() < 0.3,
        loop=chance.choice(["train_batch", "familiar"]),
        harmony=harmony,
    )


@pytest.mark.parametrize("size", [2, 3])
def test_plans_at_random_train_to_the_bits(size: int) -> None:
    several = [_at_random(100 * size + number) for number in range(24)]
    found = run(size, train_all, several, limit_s=300)
    told = {}
    for index, training in enumerate(several):
        told[str(training)] = differences([of_rank[index] for of_rank in found], train_plainly(training, size))
    assert not {training: what for training, what in told.items() if what}


FEW = (BITWISE[1], BITWISE[4], BITWISE[7], BITWISE[-3], BITWISE[-1], CLOSE[0])
CHOSEN = [
    pytest.param(2, FEW, id="2"),
    pytest.param(2, [training for training in (*BITWISE, *CLOSE) if training not in FEW], id="2-others"),
    pytest.param(3, (*BITWISE, *CLOSE), id="3"),
    pytest.param(4, (*BITWISE[:7], *BITWISE[-3:], *CLOSE[:5]), id="4"),
]


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_process_may_have_no_gradient_in_a_pack(size: int, place: str) -> None:
    several = [replace(training, harmony={**training.harmony, "reduce": place}) for training in WITHOUT_GRADIENT]
    found = run(size, train_all, several)
    for index, training in enumerate(several):
        told = differences([of_rank[index] for of_rank in found], train_plainly(training, size))
        assert not told, (training, told)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize(("size", "chosen"), CHOSEN)
def test_training_is_that_of_plain_pytorch(size: int, chosen: Sequence[Training], place: str) -> None:
    several = [replace(training, harmony={**training.harmony, "reduce": place}) for training in chosen]
    found = run(size, train_all, several, limit_s=300)
    told: dict[str, list[str]] = {}
    for index, training in enumerate(several):
        relative = 0.0 if chosen[index] in BITWISE else 2e-6
        of_ranks = [results[index] for results in found]
        told[str(training)] = differences(of_ranks, train_plainly(training, size), relative)
        assert all(not differences([one], [of_ranks[0]]) for one in of_ranks[1:] if training.loop == "train_batch")
    assert not {training: what for training, what in told.items() if what}
