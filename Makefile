# make venv   an environment with everything that constraints.txt pins
# make demo   train a GPT-2 that exceeds its device budget eightfold, on this machine
# make test   formatting, lint, types, import rules, and the tests that say within minutes whether anything is broken
# make test-all   the same with all tests that need no GPU
# make docs   the site with all pages, their full tables, and the reference of all public names, in outputs/site
# make test-gpu PYTHON_GPU=python3   the tests that need a CUDA device, with a Python that already has torch and deepspeed
# make gpu-kit    all that a machine with a GPU and no network needs, in one folder
# make bench-overhead   the cost of a layer call, beside plain PyTorch
# make bench-prediction   predicted against measured step times (a quiet machine, ten minutes)
# make bench-memory   what spare device memory buys, with a plot
# make paper    the paper's experiments, redone: docs/paper.md (20 minutes)
# make vldb22   the engine's planner against the published schedules: docs/vldb22.md

PYTHON ?= python3
PYTHON_GPU ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
PRETRAIN := $(VENV)/.pretrain
STAMP := $(VENV)/.installed
ADAM := $(VENV)/.adam
COMPILED := $(VENV)/.compiled
# Python compiles modules when they are imported, and most of what is installed here never is.
INSTALL := $(BIN)/python -m pip install --no-compile -c constraints.txt

.DEFAULT_GOAL := venv
.PHONY: venv demo docs test test-all tests beside checks tests/simdevice test-gpu gpu-kit bench-overhead bench-prediction bench-memory paper vldb22

venv: $(STAMP)

# torch goes first, at its pinned version: whatever asks for torch afterwards finds it installed.
$(PACKAGE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e .
	touch $@

$(PRETRAIN): $(PACKAGE)
	$(INSTALL) -e ".[pretrain]"
	touch $@

$(STAMP): $(PACKAGE)
	$(INSTALL) -e ".[dev,examples]"
	touch $@

# What is compiled, once for each machine: it takes minutes, and is no test's time.
$(ADAM): $(PACKAGE)
	$(BIN)/python -m tests.compile DeepSpeedCPUAdam
	touch $@

$(COMPILED): $(STAMP)
	$(BIN)/python -m tests.compile
	touch $@

# The compiler works while pip does. The host optimizer works beside the layers: threads that wait must not spin on the
# core it needs.
demo: export OMP_WAIT_POLICY = PASSIVE
demo: export GOMP_SPINCOUNT = 0
demo:
	$(MAKE) --jobs=2 $(ADAM) $(PRETRAIN)
	$(BIN)/python examples/pretrain_gpt2/train.py

# Warnings are errors: a link that leads nowhere, a page without a place in the sidebar, a docstring that names no argument.
docs: export NO_MKDOCS_2_WARNING = 1
docs: venv
	$(BIN)/python -m tests.compatibility.run outputs/answers.md
	$(BIN)/python -m mkdocs build --strict
	@echo "written: outputs/site/index.html; with its search: $(BIN)/python -m http.server --directory outputs/site"

# One OpenMP thread and two processes, one core each: with more threads, spinning ones make small kernels many times
# slower. The test device takes torch's one place for an accelerator: its tests run in a process of their own.
# What tests compile is not make's: a ninja that finds make's jobs in the environment complains that it cannot join them.
PYTEST := env -u MAKEFLAGS $(BIN)/python -m pytest
TEST_DEVICE := tests/simdevice

# Tests start many processes, each of which reads what the first has compiled.
unexport PYTHONDONTWRITEBYTECODE

test: export DEPTH := not gpu and not deep
test-all: export DEPTH := not gpu
test test-all: export OMP_NUM_THREADS ?= 1
# DeepSpeed's own engine, which ours is compared with, looks for ninja there.
test test-all: export PATH := $(abspath $(BIN)):$(PATH)
test test-all: $(COMPILED)
	$(MAKE) --no-print-directory --jobs=3 beside tests

tests:
	$(PYTEST) --numprocesses=2 --dist=worksteal -m "$$DEPTH" --ignore=$(TEST_DEVICE) $@

# The type checker and the test device take one core each, and beside the other tests no core waits for them. What they
# print comes at their end, in one piece.
beside:
	$(MAKE) --output-sync=target checks $(TEST_DEVICE)

$(TEST_DEVICE):
	$(PYTEST) -m "$$DEPTH" $@

checks: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict harmony_ds benchmarks/vldb22
	$(BIN)/lint-imports

test-gpu:
	$(PYTHON_GPU) -m pytest -m gpu

gpu-kit: venv
	$(BIN)/python benchmarks/gpu/kit.py

bench-overhead: export OMP_NUM_THREADS = 1
bench-overhead: venv
	$(BIN)/python benchmarks/overhead/run.py

bench-prediction: export OMP_NUM_THREADS = 1
bench-prediction: venv
	$(BIN)/python -m benchmarks.prediction.run

bench-memory: export OMP_NUM_THREADS = 1
bench-memory: venv
	$(BIN)/python -m benchmarks.memory.run

PAPER := fig8 fig10 fig12 devices fig13 fig17 fig21

paper: export OMP_NUM_THREADS = 1
paper: venv
	for name in $(PAPER); do $(BIN)/python benchmarks/paper/$$name.py || exit 1; done
	$(BIN)/python benchmarks/paper/page.py

vldb22: venv
	$(BIN)/python -m benchmarks.vldb22.run
