# `make train` and `make test` do all the set-up: they need Python 3.11+, pip, make and g++.
PYTHON ?= python3
# The published measurements were made with torch 2.13.
TORCH ?= torch>=2.11,<2.14
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test test-default test-long test-torch-versions lint docs clean

train: $(VENV)/installed
	rm -rf outputs/make_train
	$(BIN)/ecrl train cartpole_ppo --run-dir outputs/make_train
	$(BIN)/ecrl eval outputs/make_train --env gymnasium:CartPole-v1 --num-episodes 100

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long" --durations=60

test-default: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not long"

test-long: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m long

COMPILE_TESTS := tests/compile tests/loop/test_buffers.py tests/test_tracing_state.py tests/test_rng.py

# The compile tests with the oldest torch that is supported and the newest that the index offers, each in a new environment.
test-torch-versions: test-torch-oldest test-torch-newest

test-torch-oldest: TORCH := torch==2.11.*
test-torch-newest: TORCH := torch
test-torch-oldest test-torch-newest: test-torch-%:
	$(PYTHON) -m venv --clear build/torch-$*
	build/torch-$*/bin/python -m pip install --quiet --editable . hypothesis pytest pytest-xdist "$(TORCH)"
	build/torch-$*/bin/python -m pip install --quiet --upgrade "$(TORCH)"
	build/torch-$*/bin/python -m pytest -n 2 --dist loadfile $(COMPILE_TESTS) -m "not long"

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'build/docs/index.html; its search needs a server: $(BIN)/python -m http.server --directory build/docs'

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || (rm -rf $(VENV); exit 1)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable . "$(TORCH)"
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[dev]" "$(TORCH)"
	touch $(VENV)/installed $@

$(VENV)/installed-docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[docs]" "$(TORCH)"
	touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) outputs build
