# make train   train a small Qwen3-MoE on two ranks, on the text of Python's standard library
# make test    everything that CI checks
# make quick   lint, and the tests of passes and runtime that need one process and no compiler, a minute or two
# make soak    kill runs that save, 200 times, and look whether anything was lost, about ten minutes
# make bench   Hecate beside its rivals on an emulated cluster, 55 minutes (make bench-full: five shapes and links,
#              about four hours; either goes on after an interruption with BENCH=--continue)
# make gpu     on a machine with a GPU and torch for it: its tests, training steps, kernels, eight minutes (docs/gpu.md)
# All but make gpu make .venv and install what they need. `make test TORCH=2.11.0` is for the other end of the declared
# range.

PYTHON ?= python3
RANKS ?= 2
# The release that the tests are run with. Another one has an environment of its own.
TORCH ?= 2.13.0
VENV := .venv$(if $(filter-out 2.13.0,$(TORCH)),-$(TORCH))
# What is installed beside it, where the newest releases do not fit.
CONSTRAINTS := $(wildcard constraints/torch-$(TORCH).txt)
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: train test quick check soak bench bench-full bench-step gpu clean

train: $(VENV)/.installed
	$(BIN)/torchrun --nproc-per-node $(RANKS) --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 examples/train.py

test: $(VENV)/.installed check
	$(BIN)/pytest -n 2 --dist loadfile -m "not distributed"
	$(BIN)/pytest -m distributed

quick: $(VENV)/.installed
	$(BIN)/ruff check --quiet .
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not distributed and not slow" tests/test_import_order.py tests/test_package.py tests/passes tests/runtime

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# Releases of torch give the same functions other types.
	$(if $(filter 2.13.0,$(TORCH)),$(BIN)/mypy -p hecate)

soak: $(VENV)/.installed
	$(BIN)/python -m tests.soak --cycles 200

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.compare $(BENCH)

bench-full: $(VENV)/.installed
	$(BIN)/python -m benchmarks.compare --full $(BENCH)

bench-step: $(VENV)/.installed
	$(BIN)/python -m benchmarks.compile_and_step

# With the Python that is there, whose torch has CUDA; nothing is installed.
gpu:
	PYTHONPATH=typings:. $(PYTHON) -m benchmarks.gpu_check $(GPU)

# torch first and by itself, in the version that the tests were run with; the range in pyproject.toml is wider.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet --no-compile torch==$(TORCH)
	$(BIN)/pip install --quiet --no-compile --editable '.[test]' $(addprefix --constraint ,$(CONSTRAINTS))
	@# pip would compile on one core; what fails are templates that are no Python.
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

clean:
	rm -rf .venv .venv-* build hecate-dump *.egg-info
