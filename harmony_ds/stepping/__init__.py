"""The micro-batches of one optimizer step: queued, planned, and run together."""
