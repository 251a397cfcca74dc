# The commands of a contributor. `make setup` is a no-op when nothing it depends on has changed.
PYTHON ?= python3
GPU ?= 0
ARGS ?=
BIN := .venv/bin

.PHONY: setup quickstart check test test-ci test-all docs wheel clean

setup:  ## .venv with everything; GPU=1 for CUDA
	@$(PYTHON) launch/install.py --gpu $(GPU)

quickstart: setup  ## train the tiny policy with real vLLM, about five minutes on two cores
	@$(BIN)/async-rl train configs/quickstart.yaml $(ARGS)

check: setup  ## lint, format, types, floors
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo

test: check  ## checks, then unit and process tests
	$(BIN)/pytest -m "not slow and not whole" $(ARGS)

test-ci: check  ## whole runs of every method and more faults, too
	$(BIN)/pytest -m "not slow" $(ARGS)

test-all: check  ## the slow ones too
	$(BIN)/pytest $(ARGS)

docs: setup  ## config.md, algorithms.md and the README's table of algorithms, from async_rl/config
	$(BIN)/python docs/reference.py

wheel: setup
	$(BIN)/python -m build --wheel --outdir dist

clean:  ## everything that git ignores but the models, runs and .venv
	rm -rf dist build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find async_rl tests docs launch benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
