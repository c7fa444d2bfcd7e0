"""Several processes train to the bits of plain PyTorch, with gradients added up in the order of the ranks."""

from dataclasses import replace

import pytest

from tests.parallel.processes import run
from tests.parallel.training import Training, differences, train_plainly, trainings

SHARE = {"weights": "share"}
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
    Training(harmony={"fuse_last_pack": False, "prefetch": False, "just_in_time_update": False}),
    Training(harmony={"stash": "host", "overlap_update": False}, clip=0.05, accumulation=3),
    Training(harmony={"pack_layers": None, "device_memory_gib": 0.001}, clip=0.05),
    Training(model="llama", steps=2),
    Training(model="llama", bf16=True, clip=0.05, steps=2),
    Training(model="llama", bf16=True, steps=2, loop="familiar", harmony=SHARE),
    Training(model="llama", steps=2, clip=0.05, harmony={**SHARE, "pack_layers": None, "device_memory_gib": 0.02}),
    Training(loop="one looks", harmony=SHARE),
    Training(harmony={**SHARE, "grouping": False, "fuse_last_pack": False}, accumulation=1),
    Training(model="experts", clip=0.01, harmony={**SHARE, "stash": "host", "prefetch": False}),
)
CLOSE = (
    Training(harmony={"reproducible": False}, clip=0.05),
    # DeepSpeed's op takes powers of the betas otherwise for the first parameter that it steps than for the others.
    Training(optimizer="DeepSpeedCPUAdam"),
    Training(optimizer="DeepSpeedCPUAdam", bf16=True, clip=0.05),
    # Its embeddings are tied: their gradient comes from two packs, and its additions are regrouped.
    Training(model="gpt2", clip=0.05, steps=2, optimizer="SGD"),
)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_training_is_that_of_plain_pytorch(size: int, place: str) -> None:
    chosen = (*BITWISE, *CLOSE) if size < 4 else (*BITWISE[:7], *BITWISE[-3:], *CLOSE[:2])
    several = [replace(training, harmony={**training.harmony, "reduce": place}) for training in chosen]
    found = run(size, trainings, several, limit_s=300)
    told: dict[str, list[str]] = {}
    for index, training in enumerate(several):
        relative = 0.0 if chosen[index] in BITWISE else 2e-6
        of_ranks = [results[index] for results in found]
        told[str(training)] = differences(of_ranks, train_plainly(training, size), relative)
        assert all(not differences([one], [of_ranks[0]]) for one in of_ranks[1:] if training.loop == "train_batch")
    assert not {training: what for training, what in told.items() if what}
