"""accelerate's loop with `install_as_deepspeed()`, in several processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch import Tensor
from torch.utils.data import DataLoader

import harmony_ds
from harmony_ds.errors import UnsupportedError
from tests.distributed.processes import run
from tests.integrations.test_as_deepspeed import DS_CONFIG
from tests.integrations.test_trainer import llama, text
from tests.oracle import train_plainly

SIZE = 2


def _accelerator(**more: Any) -> Accelerator:
    harmony_ds.install_as_deepspeed()
    plugin = DeepSpeedPlugin(hf_ds_config=dict(DS_CONFIG))
    return Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=4, **more)


def _trained() -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], list[Tensor]]:
    """Weights, what `get_state_dict` says, the mean loss of all processes for each micro-batch, and gathered losses."""
    accelerator = _accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    assert accelerator.num_processes == SIZE
    model = llama()
    engine, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(text(32), batch_size=2)
    )
    losses = []
    for batch in loader:
        with accelerator.accumulate(engine):
            loss = engine(**batch).loss
            losses.append(loss.detach())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    means = [float(accelerator.reduce(loss, "mean")) for loss in losses]
    gathered = [accelerator.gather(loss) for loss in losses]
    weights = {name: weight.clone() for name, weight in accelerator.unwrap_model(engine).state_dict().items()}
    return weights, accelerator.get_state_dict(engine), means, gathered


def test_an_accelerate_loop_trains_as_plain_pytorch_with_the_samples_of_all_processes() -> None:
    expected = llama()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    batches = [*DataLoader(text(32), batch_size=2)]
    groups = [batches[step : step + 4 * SIZE] for step in range(0, len(batches), 4 * SIZE)]  # dealt in turn
    found = train_plainly(expected, groups, optimizer, clip=0.5, seed_of=lambda *_: 0)
    losses = [loss for group in found for loss in group]
    dealt = [losses[index : index + SIZE] for index in range(0, len(losses), SIZE)]

    for weights, state, means, gathered in run(SIZE, _trained, limit_s=200):
        for name, value in expected.state_dict().items():  # sums in another order: to their rounding, through AdamW
            assert torch.allclose(weights[name], value, atol=1e-5), name
            assert torch.equal(state[name], weights[name])
        assert [one.tolist() for one in gathered] == [pytest.approx(pair, rel=1e-5) for pair in dealt]
        assert means == pytest.approx([sum(pair) / SIZE for pair in dealt], rel=1e-5)


def _not_told() -> str:
    accelerator = _accelerator()
    model = llama()
    with pytest.raises(UnsupportedError) as caught:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(text(32), batch_size=2))
    return str(caught.value)


def test_where_accelerate_counts_one_process_it_is_refused_by_name() -> None:
    for said in run(SIZE, _not_told, limit_s=200):
        assert "accelerate counts 1 processes, torch.distributed 2" in said and 'backend="gloo"' in said
