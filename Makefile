# Everything happens in .venv; the first command of any kind makes it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo quickstart test lint bench clean
.DEFAULT_GOAL := help

help:  ## show what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: .venv/installed  ## train PPO on CartPole on an embedded cluster until it is solved
	$(BIN)/python -m pipelines.ppo --env CartPole-v1 --sync divergence --threshold 0.01 --stop-at 475

quickstart: .venv/installed  ## collect from CartPole and LunarLander, step by step
	$(BIN)/python examples/quickstart.py

test: .venv/installed  ## run all tests, ruff and mypy among them
	$(BIN)/python -m pytest

lint: .venv/installed  ## check style and types, and format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

bench: .venv/installed  ## measure steps and rows per second
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/collect.py

clean:  ## remove what the commands above made
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache *.egg-info
