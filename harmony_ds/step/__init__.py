"""The micro-batches of one optimizer step, from the first call to the last update."""
