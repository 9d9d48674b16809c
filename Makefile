# Everything happens in .venv; the first command of any kind makes it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo quickstart test test-slurm lint docs docs-serve dist bench bench-peers bench-replay chaos fuzz clean
.DEFAULT_GOAL := help

help:  ## show what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable ".[train]"
	@touch $@

.venv/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable ".[dev]"
	@touch .venv/installed $@

demo: .venv/installed  ## PPO, then DQN, on CartPole on an embedded cluster until solved; plots, a dataset
	$(BIN)/python -m pipelines.ppo --env CartPole-v1 --stop-at 475
	$(BIN)/python -m pipelines.dqn --env CartPole-v1 --stop-at 475

quickstart: .venv/installed  ## collect from CartPole and LunarLander, step by step
	$(BIN)/python examples/quickstart.py

# Two halves at a time: one waits for clusters while the other computes.
FIRST := tests/store tests/pipelines tests/studies tests/fuzz tests/slurm tests/test_examples.py tests/test_style.py
test: .venv/dev  ## run all tests, ruff and mypy among them
	@$(BIN)/python -m pytest $(FIRST) > .pytest-first.log 2>&1 & first=$$!; \
	$(BIN)/python -m pytest $(FIRST:%=--ignore=%); second=$$?; \
	wait $$first; first=$$?; cat .pytest-first.log; rm -f .pytest-first.log; \
	exit $$((first + second))

test-slurm: .venv/dev  ## run the tests on a real Slurm, installed first if this is root on Debian
	.ci/install-slurm
	$(BIN)/python -m pytest tests/slurm

lint: .venv/dev  ## check style and types, and format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The variable silences a notice of the theme about its own future, which is no fault of a page.
docs: .venv/dev  ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: .venv/dev  ## show the documentation on this machine, and again when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

dist: .venv/dev  ## build the wheel and the source distribution into dist/
	rm -rf build dist
	$(BIN)/python -m build

bench: .venv/dev  ## measure steps and rows per second
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/collect.py

bench-peers: .venv/dev  ## measure the peers beside ours, collecting and then training; takes hours
	$(BIN)/python -m benchmarks.peers.run
	$(BIN)/python -m benchmarks.learners

.venv-peers/replay/installed: benchmarks/peers/requirements/replay.txt pyproject.toml
	$(PYTHON) -m venv .venv-peers/replay
	.venv-peers/replay/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-peers/replay/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .[fast] --requirement $<
	@touch $@

bench-replay: .venv-peers/replay/installed  ## measure the replay store beside other replay buffers
	.venv-peers/replay/bin/python benchmarks/replay.py

fuzz: .venv/dev  ## ten thousand wrong calls; each must end soon, in an error of ours
	$(BIN)/python tests/fuzz/fuzz.py

chaos: .venv/dev  ## half an hour of faults while DQN collects; every row is checked
	$(BIN)/python tests/chaos/chaos.py

clean:  ## remove what the commands above made
	rm -rf .venv .venv-peers build dist site .mypy_cache .ruff_cache .pytest_cache *.egg-info
