# Every target makes .venv when it is missing and installs again when pyproject.toml or the lock file changed.
#   make train   train configs/digits_vlm.gin           CONFIG=configs/other.gin FLAGS='--gin.Train.steps=100'
#   make sample-data    write data/digits: dialogues about digits in each layout that configs/llava_json.gin can read
#   make test    the fast tests                         TESTS=tests/mesh
#   make test-slow / test-all    the long matrices alone / everything
#   make lint    ruff and pyright
#   make bench   benchmarks                             FLAGS=...
#   make mutants wrong changes, one at a time, against the tests: hours    FLAGS=routes.py
#   make lock    resolve the newest versions that pyproject.toml allows into requirements.lock
#   make clean   remove .venv and caches (never runs/)

# The first Python that is new enough and really starts (a version manager's shim may not).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
CONFIG ?= configs/digits_vlm.gin
FLAGS ?=
TESTS ?= tests
WORKERS ?= 2
# `make LOCK= ...` takes the newest versions that pyproject.toml allows instead of the locked ones.
LOCK ?= requirements.lock

VENV := .venv
BIN := $(VENV)/bin
# Byte code is made when a module is first imported: compiling every installed file costs more than it saves.
PIP := -m pip --quiet --quiet --disable-pip-version-check --no-input
INSTALL := $(PIP) install --no-compile --progress-bar off $(if $(LOCK),--constraint $(LOCK))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

.PHONY: help train sample-data test test-slow test-all lint bench mutants lock clean install install-dev
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@sed -n '/^# *make /s/^# *//p' Makefile

train: $(VENV)/installed
	$(BIN)/python -m mmjax.train --gin_file=$(CONFIG) $(FLAGS)

sample-data: $(VENV)/installed
	$(BIN)/python -m mmjax.data.sample_data $(FLAGS)

test: $(VENV)/installed-dev
	$(PYTEST) -m 'not slow'

# pytest exits 5 when it has collected nothing.
test-slow: $(VENV)/installed-dev
	$(PYTEST) -m slow || [ $$? -eq 5 ]

test-all: $(VENV)/installed-dev
	$(PYTEST)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/installed
	$(BIN)/python -m mmjax.bench $(FLAGS)

mutants: $(VENV)/installed-dev
	$(BIN)/python tests/mutants/run.py $(FLAGS)

install: $(VENV)/installed

install-dev: $(VENV)/installed-dev

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "mmjax needs Python 3.11 or newer with venv: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml $(LOCK) | $(BIN)/python
	@echo "installing mmjax into $(VENV) (about a minute)"
	@$(BIN)/python $(INSTALL) --editable .
	@touch $@

# A second stamp, so that `make train` does not wait for the development tools.
$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing the development tools into $(VENV)"
	@$(BIN)/python $(INSTALL) --editable '.[dev]'
	@touch $@

# Resolved in an environment of its own: what a person has installed into .venv by hand stays out of the lock.
lock:
	@test -n "$(PYTHON)" || { echo "mmjax needs Python 3.11 or newer with venv: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	rm -rf .lock-venv
	$(PYTHON) -m venv .lock-venv
	.lock-venv/bin/python $(PIP) install --no-compile --progress-bar off --editable '.[dev]'
	{ echo "# Versions that the tests run with. Made by 'make lock'; do not edit."; \
	  .lock-venv/bin/python $(PIP) freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==[^ ]+$$'; } > requirements.lock.new
	mv requirements.lock.new requirements.lock
	rm -rf .lock-venv

clean:
	rm -rf $(VENV) .lock-venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find mmjax tests -name __pycache__ -type d -prune -exec rm -rf {} +
