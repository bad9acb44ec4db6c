# `make demo` and `make test` are all that a newcomer needs: each creates .venv and installs into it when it has to.
SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLUSTER := $(VENV)/.cluster
NETWORK := $(VENV)/.network
ADAPTERS := $(VENV)/.adapters
WEB := $(VENV)/.web
# Tests run in this many processes, each with one thread: on small models that beats one process with many threads.
JOBS ?= 2

# A folder of data sets beside the clone is used unless UNALIKE_DATA names another.
ifndef UNALIKE_DATA
  ifneq ($(wildcard ../shared/data),)
    export UNALIKE_DATA := $(abspath ../shared/data)
  endif
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long lint format bench docs clean test-cluster demo-cluster bench-cluster test-network demo-network bench-network test-adapters test-web demo-serve bench-serve fuzz mutate

help: ## Say what each target does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

setup: $(STAMP) ## Create .venv and install Unalike with exact versions

demo: $(STAMP) ## Train and compare methods on unlike clients; ends in a table and a report
	$(BIN)/unalike demo

# Byte code is kept, also where the environment says otherwise: each process of the tests, and each that a test starts,
# would have to compile all files once more.
PROCESSES = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

test: $(STAMP) ## Run all tests
	$(PROCESSES) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-long: $(STAMP) ## Run the tests that take longer, as before a release
	$(PROCESSES) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long

# What needs Ray runs in a network namespace of its own, without a dashboard, and reports nothing to anybody.
ON_RAY = RAY_USAGE_STATS_ENABLED=0 $(PROCESSES) .ci/loopback

test-cluster: $(CLUSTER) ## Run the tests that need workers of a Ray cluster
	$(ON_RAY) $(BIN)/python -m pytest tests/cluster

demo-cluster: $(CLUSTER) ## Train on two workers, kill one, and compare with one process
	$(ON_RAY) $(BIN)/python examples/on_workers.py

bench-cluster: $(CLUSTER) ## Measure workers against one process
	$(ON_RAY) $(BIN)/python -m benchmarks.cluster

test-network: $(NETWORK) ## Run the tests of a network: a hub and sites as processes, on the loopback
	UNALIKE_TEST_NETWORK=1 $(PROCESSES) $(BIN)/python -m pytest tests/network

demo-network: $(NETWORK) ## Train over three sites with keys, rows and policies of their own, and compare with one process
	$(PROCESSES) $(BIN)/python examples/on_a_network.py

bench-network: $(NETWORK) ## Measure messages to 3, 10 and 30 nodes, and a round at three sites
	$(PROCESSES) $(BIN)/python -m benchmarks.network times
	$(PROCESSES) $(BIN)/python -m benchmarks.network rounds

test-adapters: $(ADAPTERS) ## Run the tests of adapters with networks of transformers, and with PEFT
	UNALIKE_TEST_ADAPTERS=1 $(PROCESSES) $(BIN)/python -m pytest tests/adapters

# The page runs in the Chromium that is installed (Debian: apt-get install chromium), or in the one that CHROMIUM names.
test-web: $(WEB) ## Run the tests of the service and of its page, in a real Chromium
	UNALIKE_TEST_WEB=1 $(PROCESSES) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/web

demo-serve: $(WEB) ## Train, serve, and use the page in a real Chromium, with a picture of each step
	$(PROCESSES) $(BIN)/python examples/serve_a_page.py docs/images

bench-serve: $(WEB) ## Measure the service: requests a second, latency, memory
	$(BIN)/python -m benchmarks.serve

# FUZZ_SECONDS is the time for each target.
fuzz: $(STAMP) ## Hand damaged files and messages to all that reads them
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[fuzz]'
	$(PROCESSES) $(BIN)/python -m tests.fuzz --seconds $(or $(FUZZ_SECONDS),60)

# MUTATE has other options, such as --count 600, --seed 1, --again.
mutate: $(STAMP) ## Put mistakes into the code, one at a time, and see whether a test fails (hours)
	$(BIN)/python -m tests.mutate $(MUTATE)

lint: $(STAMP) ## Check style, format, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Bring all files into the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Measure speed and memory
	$(BIN)/python -m benchmarks

docs: $(STAMP) ## Build the documentation into site/
	$(BIN)/python -m reproductions --page
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## Remove .venv, caches and built files
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that nothing installed later chooses another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Unalike needs Python 3.11 or newer, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || { echo "Creating $(VENV) (once; a few minutes)"; $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt hatchling
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[data,dev,onnx,tune,mlflow,tensorboard]'
	@touch $@

$(CLUSTER): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[cluster]'
	@touch $@

$(NETWORK): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[network]'
	@touch $@

$(ADAPTERS): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[transformers,peft]'
	@touch $@

$(WEB): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[serve,browser]'
	@touch $@
