"""A causal language model by accelerate: the first two lines are new, the rest is accelerate's usual DeepSpeed script."""

from __future__ import annotations

import harmony_ds

harmony_ds.install_as_deepspeed()

import torch  # noqa: E402
from accelerate import Accelerator, DeepSpeedPlugin  # noqa: E402
from common import ACCUMULATION, MICRO_BATCH, ds_config, make_model, parse_options, samples  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

options = parse_options(__doc__)
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config(options.steps)), gradient_accumulation_steps=ACCUMULATION
)
model = make_model(options)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(samples(options), batch_size=MICRO_BATCH)
)
step, losses = 0, []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        step += 1
        print(f"step {step} loss {torch.stack(losses).mean():.6f}")
        losses.clear()
accelerator.end_training()
