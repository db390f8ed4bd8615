# Needs python3 (3.11 to 3.13), git and make. Everything else goes into .venv.
#
#   PYTHON=python3.12   the interpreter to build .venv with
#   TORCH_INDEX=URL     where pip finds a CPU build of torch on a machine without an NVIDIA GPU

SHELL := /bin/bash
PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := .venv/bin
STAMP := .venv/installed

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-cluster test test-all bench proto lint clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

venv: $(STAMP) ## create .venv with everything the other targets need

$(STAMP): pyproject.toml tools/make_venv.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash tools/make_venv.sh .venv
	@touch $@

demo: $(STAMP) ## one server, two workers, one shared cache, a real model
	$(BIN)/python -m radixkv_worker.demo

demo-cluster: $(STAMP) ## one Mooncake master, two servers: a prefix of one is attached under the other
	$(BIN)/python -m radixkv_worker.demo_cluster

lint: $(STAMP) ## style, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## lint and tests, one sample of each slow case
	$(BIN)/python -m pytest -m "not slow"

test-all: lint ## every test, with loops and kill series
	$(BIN)/python -m pytest

bench: $(STAMP) ## measure; prints ratios, writes bench/results.json
	$(BIN)/pip install --quiet --editable '.[bench]'
	$(BIN)/python -m bench

proto: $(STAMP) ## generate radixkv/v1 from proto/
	$(BIN)/python tools/generate_proto.py .

clean: ## remove .venv and caches
	rm -rf .venv build *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
