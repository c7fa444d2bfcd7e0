"""A Trainer with a loss of its own."""

from typing import Any

from transformers import Trainer, TrainingArguments

from tests.integrations.scripts.pieces import COMMON, model, options, rows


class SmoothTrainer(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        loss = loss + 1e-4 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


given = options()
arguments = TrainingArguments(output_dir=given.output_dir, deepspeed=given.deepspeed, **COMMON)
trainer = SmoothTrainer(model=model(), args=arguments, train_dataset=rows(), eval_dataset=rows(4))
trainer.train()
evaluated = trainer.evaluate()["eval_loss"]
