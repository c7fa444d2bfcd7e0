# make venv   an environment with everything that constraints.txt pins
# make demo   train a GPT-2 that exceeds its device budget eightfold, on this machine
# make test   formatting, lint, types, import contracts and all tests that need no GPU
# make test-gpu PYTHON_GPU=python3   the tests that need a CUDA device, with a Python that already has torch and deepspeed
# make bench-overhead   what the engine costs beside plain PyTorch

PYTHON ?= python3
PYTHON_GPU ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := venv
.PHONY: venv demo test test-gpu bench-overhead

venv: $(STAMP)

# torch goes first, at its pinned version: whatever asks for torch afterwards finds it installed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch -c constraints.txt
	$(BIN)/python -m pip install -e ".[dev,examples]" -c constraints.txt
	touch $@

# The host optimizer works beside the layers: threads that wait must not spin on the core it needs.
demo: export OMP_WAIT_POLICY = PASSIVE
demo: export GOMP_SPINCOUNT = 0
demo: venv
	$(BIN)/python examples/pretrain_gpt2/train.py

# The test device takes torch's one place for an accelerator, so its tests run in a process of their own.
# One OpenMP thread: with more, spinning threads on busy cores make small kernels many times slower.
test: export OMP_NUM_THREADS = 1
test: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict harmony_ds
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m "not gpu" --ignore tests/simdevice
	$(BIN)/python -m pytest tests/simdevice

test-gpu:
	$(PYTHON_GPU) -m pytest -m gpu

bench-overhead: export OMP_NUM_THREADS = 1
bench-overhead: venv
	$(BIN)/python benchmarks/overhead/run.py
