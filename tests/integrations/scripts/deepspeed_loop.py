"""A loop for DeepSpeed."""

import json
from pathlib import Path

import deepspeed
import torch
from torch.utils.data import DataLoader

from tests.integrations.scripts.pieces import model, options, rows

given = options()
config = json.loads(Path(given.deepspeed).read_text())
config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
trained = model()
engine, _, _, _ = deepspeed.initialize(
    model=trained, optimizer=torch.optim.AdamW(trained.parameters(), lr=1e-2), config=config
)
for batch in DataLoader(rows().with_format("torch"), batch_size=2):  # type: ignore[arg-type]
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
