# One front door. Every target does its own set-up; all it needs is make and Python 3.10 or newer.
#   make test    lint, types and the whole test suite      make demo [TEXT="a.txt b.md"]   a real model through the board
#   make quick   the tests that take less than a minute    make bench                      the price of a call, beside its peers
#   make gpu     the tests for a GPU, and the conformance kit for every backend that works on it
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := $(foreach each,core $(wildcard plugins/*),-e $(each))
PIP := $(BIN)/python -m pip
SOURCES := core plugins tests examples benchmarks

.PHONY: test quick lint types unit kit gpu oldest demo bench format clean
.DEFAULT_GOAL := test

# pip learnt dependency groups in 25.1; the venv's own may be older.
$(VENV)/.ready: pyproject.toml constraints.txt $(wildcard core/pyproject.toml plugins/*/pyproject.toml)
	$(PYTHON) -c 'import sys; sys.exit("fuseboard needs Python 3.10 or newer; set PYTHON=python3.x" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -U "pip>=25.1,<26.2"
	$(PIP) install -q -c constraints.txt $(PACKAGES) --group test --group tilelang --group lint
	touch $@

$(VENV)/.demo: $(VENV)/.ready
	$(PIP) install -q -c constraints.txt --group demo
	touch $@

$(VENV)/.bench: $(VENV)/.ready
	$(PIP) install -q -c constraints.txt --group bench
	touch $@

test: lint types unit kit

lint: $(VENV)/.ready
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/python -m fuseboard.ops.lint core plugins examples benchmarks

types: $(VENV)/.ready
	$(BIN)/mypy core/src plugins/*/src

# With the demo's packages, so that the demo is tested too; without them its tests are skipped and say so.
# A process for each core, a file for each process: many tests wait for child processes that import torch.
unit: $(VENV)/.demo
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile

quick: $(VENV)/.ready
	$(BIN)/pytest -m "not slow" -x

# Every backend that can run here under the conformance kit.
kit: $(VENV)/.ready
	$(BIN)/pytest -q --fuseboard-backend sdpa-cpu
	$(BIN)/pytest -q --fuseboard-backend sdpa-math

# Not part of `test`, which has to pass without one. The doctor knows which kernel packages are installed and work.
ON_CUDA := "import json, sys; print(*[each['name'] for each in json.load(sys.stdin)['backends'] \
	if any(at['device'][:4] == 'cuda' and at['state'] == 'works' for at in each['devices'])])"

gpu: $(VENV)/.demo
	$(BIN)/pytest -m gpu
	set -e; for name in $$($(BIN)/fuseboard doctor --json | $(BIN)/python -c $(ON_CUDA)); do \
		$(BIN)/pytest -q --fuseboard-backend $$name --fuseboard-device cuda; done

# The oldest versions that the packages declare. Not part of `test`: torch 2.6 comes with CUDA, which is gigabytes.
oldest:
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install -q -U "pip>=25.1,<26.2"
	$(VENV)-oldest/bin/python -m pip install -q -c constraints-oldest.txt $(PACKAGES) --group test
	$(VENV)-oldest/bin/pytest tests/core tests/adapters tests/ops tests/plugins tests/testing

demo: $(VENV)/.demo
	@$(BIN)/python examples/embed_text.py $(if $(JSON),--json) $(TEXT)

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/dispatch.py

format: $(VENV)/.ready
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
