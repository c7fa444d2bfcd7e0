"""Programs that people write, each run in plain PyTorch and on the engine: `python -m tests.exactness.run`."""
