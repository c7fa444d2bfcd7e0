"""TRL's direct preference optimization of LoRA adapters; the reference is the model without them."""

from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

from tests.integrations.scripts.pieces import COMMON, model, options, tokenizer

given = options()
pairs = Dataset.from_list(
    [{"prompt": "the dog", "chosen": " sat here" if row % 2 else " sat", "rejected": " ran"} for row in range(16)]
)
arguments = DPOConfig(
    output_dir=given.output_dir, deepspeed=given.deepspeed, max_length=16, gradient_checkpointing=False, **COMMON
)
lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = DPOTrainer(model=model(), args=arguments, train_dataset=pairs, processing_class=tokenizer(), peft_config=lora)
trainer.train()
