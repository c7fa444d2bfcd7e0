"""TRL's supervised fine-tuning."""

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from tests.integrations.scripts.pieces import COMMON, model, options, tokenizer

given = options()
texts = Dataset.from_list([{"text": f"the dog sat {'here' if row % 3 else 'there the cat ran'}"} for row in range(16)])
arguments = SFTConfig(
    output_dir=given.output_dir, deepspeed=given.deepspeed, max_length=16, gradient_checkpointing=False, **COMMON
)
trainer = SFTTrainer(model=model(), args=arguments, train_dataset=texts, processing_class=tokenizer())
trainer.train()
