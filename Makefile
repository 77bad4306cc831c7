# Every target makes its own environment in .venv; nothing but Python >= 3.11 and make is needed.
PYTHON ?= python3
GPU_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.core
# Trust what the machine trusts, as pip does.
export UV_SYSTEM_CERTS := true
# Tests start many processes, each of which would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
# More workers than cores, because tests wait much of their time; more than twice as many only take more CPU time.
export PYTEST_XDIST_AUTO_NUM_WORKERS ?= $(shell expr 2 \* $$(nproc))
# Not even imported: collecting the live tests takes a second of each worker.
TESTS := $(BIN)/pytest -n auto --dist worksteal --ignore tests/live
DEV_STAMP := $(VENV)/.dev
KERNELS_STAMP := $(VENV)/.kernels
DOCS_STAMP := $(VENV)/.docs
# Of each target of `make fuzz`; 0: the bounded number of runs that .ci/run takes.
FUZZ_SECONDS ?= 300
# 0: drawn at random; .ci/run fixes it, so that the same code passes or fails each time.
FUZZ_SEED ?= 0

# What failed beside the tests of another worker runs once more, alone.
AGAIN := --last-failed --last-failed-no-failures none
SOAK_RUNS := 10
# The members of the workspace are installed from their folders and have no hash.
NO_MEMBERS := --no-emit-package kvroute-engine --no-emit-package kvroute
# Of the three packages, in percent of its lines and branches; `make coverage` fails below it.
COVERAGE_MIN := 90

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow coverage soak fuzz lint types layers docs results protos check vllm clients live gpu bench requirements manifests clean

help:  ## this list
	@awk -F ':.*##[ ]*' '/^[a-z-]+:.*##/ { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(BIN)/uv: requirements/uv.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@touch $(BIN)/uv

$(STAMP): $(BIN)/uv requirements/serve.txt pyproject.toml engine/pyproject.toml studies/pyproject.toml
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/serve.txt -r requirements/build.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable ./engine --editable . --editable ./studies
	@touch $(STAMP)

$(DEV_STAMP): $(STAMP) requirements/dev.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/dev.txt
	@touch $(DEV_STAMP)

# Part of the setup, so that workers do not compile the same kernels at the same time. Later changes are compiled by tests.
$(KERNELS_STAMP): $(DEV_STAMP)
	$(BIN)/python -m tests.kernels
	@touch $(KERNELS_STAMP)

$(DOCS_STAMP): $(STAMP) requirements/docs.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/docs.txt
	@touch $(DOCS_STAMP)

demo: $(STAMP)  ## a live gateway on 16 emulated engines under three policies, beside the simulator's prediction
	$(BIN)/kvroute demo examples/fat-tree-64gpu.yaml --out demo-results

test: $(KERNELS_STAMP)  ## the tests of every part, with few examples of Hypothesis
	$(TESTS) -m "not slow and not live"

test-slow: $(KERNELS_STAMP)  ## the tests with the mark `slow`
	$(TESTS) -m "slow and not live"

# Child processes are measured too; live tests are not part of it. Settings: [tool.coverage] in pyproject.toml.
coverage: $(KERNELS_STAMP)  ## both with branch coverage of src/kvroute; fails below COVERAGE_MIN percent
	HYPOTHESIS_PROFILE=full $(TESTS) -m "not live" --cov --cov-report=term:skip-covered --cov-fail-under=$(COVERAGE_MIN)

# Garbage is collected after each test: what a test leaves open is found then, and not by chance.
soak: $(KERNELS_STAMP)  ## both ten times with all examples, other ones each time, beside two busy loops
	env --unset=CI COLLECT_GARBAGE=1 HYPOTHESIS_PROFILE=full $(PYTHON) tests/soak.py --runs $(SOAK_RUNS) --loops 2 \
		-- $(MAKE) --no-print-directory --keep-going test test-slow

fuzz: $(DEV_STAMP)  ## every parser of bytes from outside, for FUZZ_SECONDS each; findings go to fuzz-findings/
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

lint: $(DEV_STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_STAMP)  ## mypy, strict
	$(BIN)/mypy

layers: $(DEV_STAMP)  ## import-linter: imports go downwards only
	$(BIN)/lint-imports

docs: $(DOCS_STAMP)  ## the documentation as a site in build/site; warnings are errors
	$(BIN)/python -m docs.generate build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# NAME: one result, although its code is the same; without it, all whose code has changed, which takes hours.
# TRACES: the folder of the recorded traces; without it, results that need one are left out with a remark.
results: $(STAMP)  ## the studies' results whose code has changed, and the pages that quote them; NAME=... TRACES=...
	$(BIN)/python -m kvroute_studies.results $(NAME) $(if $(TRACES),--traces $(TRACES))
	$(BIN)/python -m docs.generate.results

protos: $(DEV_STAMP)  ## Python code of agents/agents.proto and epp/envoy.proto, after a change of them
	$(BIN)/python -m grpc_tools.protoc -I engine/src --python_out=engine/src --pyi_out=engine/src engine/src/kvroute_engine/agent/agents.proto
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src src/kvroute/epp/envoy.proto

vllm:  ## real vLLM for CPUs with the packages of its KV connectors, in an environment of its own
	tests/live/vllm/install.sh

clients: $(DEV_STAMP)  ## clients of other projects that the live tests run, in an environment of their own
	tests/live/clients/install.sh

# From apt: python3-simgrid, chromium, chromium-driver, prometheus, systemd, libnuma1, libibverbs1, redis-server, clang, libbpf-dev, curl, openssl.
live: $(DEV_STAMP) requirements/live.txt vllm clients  ## tests against real components
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/live.txt
	$(BIN)/pytest -m "live and not alone" -n 2 --dist loadscope --durations 30 \
		|| $(BIN)/pytest -m "live and not alone" $(AGAIN)
	$(BIN)/pytest -m "live and alone"

# Not in .ci/run, which has no GPU. GPU_PYTHON needs PyTorch for CUDA, pytest and kvroute's dependencies.
gpu:  ## tests on a machine with a GPU, with GPU_PYTHON
	PYTHONPATH=engine/src:src:. $(GPU_PYTHON) -m pytest --noconftest tests/gpu/connector_on_gpu.py tests/gpu/nixl_on_gpu.py tests/gpu/all_reduce_on_gpu.py

bench: $(DEV_STAMP)  ## every measurement, beside its peer or bound
	$(BIN)/python -m bench.all

requirements: $(BIN)/uv  ## requirements/*.txt anew, after a change of dependencies in pyproject.toml
	for set in engine studies; do \
		$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate $(NO_MEMBERS) --all-extras \
			$$set/pyproject.toml --output-file requirements/$$set.txt; done
	for set in core: aiconfigurator:--extra=aiconfigurator serve:--extra=serve docs:--group=docs,--extra=serve kube:--extra=epp,--extra=kube,--extra=serve dev:--group=dev,--extra=agents,--extra=epp,--extra=kube,--extra=serve live:--group=dev,--group=live,--extra=agents,--extra=epp,--extra=kube,--extra=serve,--extra=ray,--extra=store,--extra=aiconfigurator; do \
		$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate $(NO_MEMBERS) pyproject.toml \
			$$(echo $${set#*:} | tr , ' ') --output-file requirements/$${set%%:*}.txt; done
	$(BIN)/uv pip compile --quiet --universal --no-deps --generate-hashes --no-header --no-annotate --python-version 3.11 \
		requirements/connectors.in --output-file requirements/connectors.txt
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --python-version 3.11 \
		requirements/clients.in --output-file requirements/clients.txt

manifests: $(DEV_STAMP) requirements/live.txt  ## deploy/crds and deploy/kustomize anew, and the files that the chart copies
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/live.txt
	$(BIN)/python -m tests.kube.deploy.definitions
	cp deploy/crds/*.kvroute.io.yaml deploy/helm/kvroute/files/crds/
	cp deploy/prometheus/kvroute-alerts.yml deploy/grafana/kvroute.json deploy/helm/kvroute/files/
	$(BIN)/python -m tests.kube.deploy.rendering

check: lint types layers test  ## what a change must pass before it is proposed

clean:  ## remove the environment and all results
	rm -rf $(VENV) build results demo-results .coverage .coverage.*
