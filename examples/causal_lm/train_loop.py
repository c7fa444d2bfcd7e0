"""A causal language model by DeepSpeed's own loop: only the import differs."""

from __future__ import annotations

import torch
from common import MICRO_BATCH, ds_config, make_model, parse_options, samples
from torch.utils.data import DataLoader

import harmony_ds

options = parse_options(__doc__)
model = make_model(options)
engine, _, _, _ = harmony_ds.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=ds_config(options.steps)
)
losses = []
for batch in DataLoader(samples(options), batch_size=MICRO_BATCH):
    loss = engine(**batch).loss
    engine.backward(loss)
    losses.append(loss.detach())
    engine.step()
    if engine.was_step_applied():  # losses are read after the boundary only: no forward pass runs early
        print(f"step {engine.global_steps} loss {torch.stack(losses).mean():.6f}")
        losses.clear()
print(engine.swap_report())
engine.destroy()
