"""harmony_ds under other people's training code: `transformers` (Trainer), `as_deepspeed` (accelerate)."""
