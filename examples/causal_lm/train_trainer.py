"""A causal language model by Hugging Face's Trainer."""

from __future__ import annotations

import tempfile

from common import ACCUMULATION, MICRO_BATCH, ds_config, make_model, parse_options, samples
from torch.utils.data import SequentialSampler
from transformers import TrainingArguments

from harmony_ds.integrations.transformers import HarmonyTrainer


class InOrder(HarmonyTrainer):
    """A Trainer that takes the text in its order and prints losses, as the other two scripts do."""

    def _get_train_sampler(self, train_dataset=None):  # type: ignore[no-untyped-def]
        return SequentialSampler(train_dataset or self.train_dataset)

    def log(self, logs: dict[str, float], *_: object) -> None:
        """Print one line for each step."""
        if "loss" in logs:
            print(f"step {self.state.global_step} loss {logs['loss']:.6f}")


options = parse_options(__doc__)
with tempfile.TemporaryDirectory() as folder:
    trainer = InOrder(
        model=make_model(options),
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=options.steps,
            learning_rate=1e-3,
            weight_decay=0.01,
            lr_scheduler_type="constant",
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=samples(options),
        ds_config=ds_config(options.steps),
    )
    trainer.train()
