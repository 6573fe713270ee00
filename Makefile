# Two commands for everybody: `make demo` and `make test`. `make help` lists the rest.

# PYTHON3 (3.11 or newer) makes the virtual environment; PYTHON runs what may also run without it.
VENV := .venv
PYTHON3 ?= python3
PYTHON ?= $(shell test -x $(VENV)/bin/python && echo $(VENV)/bin/python || echo python3)
PYTEST := $(VENV)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder \
    --cov --cov-fail-under=95
# The least versions that pyproject.toml allows, of Python too.
LOWEST := .venv-lowest
LOWEST_PYTHON ?= python3.11
NAME ?= convert
GRAPH ?=
SECONDS ?= 600
STEPS ?= 20000
DEVICE ?= cpu
JOBS ?= 1
COUNT ?= 500
# Hundreds of processes of the tests import the library: what the first compiles, the others find.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-cpu test-all test-lowest test-gpu sanitize fuzz soak mutants lint bench clean

help:  ## list these targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /: /'

demo: $(VENV)/.demo  ## convert, verify, time and draw a graph (GRAPH=path for yours)
	$(VENV)/bin/python -m sparsefmt demo $(if $(GRAPH),"$(GRAPH)")

# mypy takes one core, and tests wait now and then: beside each other they are done sooner.
test: $(VENV)/.test  ## everything that needs no GPU: style, types, tests, coverage of the format layer
	$(MAKE) --no-print-directory -j2 lint test-cpu

test-cpu: $(VENV)/.test
	$(PYTEST) -m "not gpu and not grid"

test-all: lint  ## `make test`, and the full grids: every instantiation for every architecture
	$(PYTEST) -m "not gpu"

test-lowest: $(LOWEST)/.test  ## formats, readers and laws with the least versions that are allowed, without torch
	$(LOWEST)/bin/python -m pytest -n auto -m "not gpu and not grid" \
	    tests/formats tests/io $(wildcard tests/laws/test_laws_of_operations.py)

test-gpu:  ## the tests that need a CUDA device, with .venv's Python or else python3
	$(PYTHON) -m pytest -m gpu

sanitize:  ## compute-sanitizer's four tools over small shapes, CuPy's memory pool off
	$(PYTHON) tests/sanitize.py

fuzz:  ## mutated files and sequences of calls (SECONDS=600, DEVICE=cuda for calls on a GPU)
	$(PYTHON) tests/fuzz/run.py --seconds $(SECONDS) --device $(DEVICE)

soak:  ## each layer for STEPS=20000 steps: memory, files and threads stay flat (DEVICE=cuda, JOBS=8)
	$(PYTHON) tests/fuzz/soak.py --steps $(STEPS) --device $(DEVICE) --jobs $(JOBS)

mutants:  ## COUNT=500 seeded changes of the formats and readers: the tests must see 85 % (JOBS=2)
	$(PYTHON) tests/mutants/run.py --count $(COUNT) --jobs $(JOBS)

lint: $(VENV)/.test  ## ruff, import-linter and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(VENV)/bin/mypy

bench:  ## one benchmark (NAME=convert), with its correctness check
	$(PYTHON) -m benchmarks $(NAME)

clean:  ## remove what these targets made, .venv too
	rm -rf $(VENV) $(LOWEST) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*

$(VENV)/bin/python:
	$(PYTHON3) -m venv $(VENV)

# Stamps: made again when what is to be installed changed, and only then.  Of what is installed the
# tests import a part, which Python compiles by itself: to compile all of it takes 20 s.  Two pips
# unpack the pins at once; the last one decides, and installs what a platform needs beside them.
$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	-sed '/^# Only/,$$d; /^#/d' constraints.txt \
	    | xargs -P 2 -n 14 $(VENV)/bin/pip install --quiet --no-compile --no-deps
	$(VENV)/bin/pip install --quiet --no-compile --constraint constraints.txt --editable '.[test,dev]'
	touch $@ $(VENV)/.demo

$(LOWEST)/.test: pyproject.toml
	$(LOWEST_PYTHON) -m venv $(LOWEST)
	grep -oE '[A-Za-z0-9_-]+>=[0-9.]+' $< | sed 's/>=/==/' > $(LOWEST)/pins.txt
	$(LOWEST)/bin/pip install --quiet --no-compile --constraint $(LOWEST)/pins.txt --editable '.[test-arrays]'
	touch $@

# The CUDA version of the driver picks the CuPy extra; without a driver, or if CuPy cannot be
# installed, the demo runs on NumPy.
$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/pip install --quiet --editable '.[cli]'
	@cuda=$$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA [A-Za-z ]*Version: *\([0-9]*\).*/\1/p'); \
	case "$$cuda" in 12) extra=cuda12 ;; ''|[0-9]|1[01]) extra= ;; *) extra=cuda13 ;; esac; \
	test -z "$$extra" || $(VENV)/bin/pip install --quiet --editable ".[$$extra]" \
	    || echo "CuPy could not be installed: the demo runs on NumPy"
	touch $@
