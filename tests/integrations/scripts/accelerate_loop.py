"""A loop of accelerate's examples, with its DeepSpeed plugin."""

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader

from tests.integrations.scripts.pieces import model, options, rows

given = options()
plugin = DeepSpeedPlugin(hf_ds_config=given.deepspeed) if given.deepspeed else None
accelerator = Accelerator(gradient_accumulation_steps=4, deepspeed_plugin=plugin)
trained = model()
engine, optimizer, batches = accelerator.prepare(
    trained,
    torch.optim.AdamW(trained.parameters(), lr=1e-2),
    DataLoader(rows().with_format("torch"), batch_size=2),  # type: ignore[arg-type]
)
engine.train()
for batch in batches:
    with accelerator.accumulate(engine):
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
