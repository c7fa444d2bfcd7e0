"""Adapters for training code of others: `transformers` (Trainer), `as_deepspeed` (accelerate)."""
