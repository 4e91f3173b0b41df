# The two commands: `make quickstart` trains a model, `make test` is everything CI runs.
# Each makes its own environment in .venv when there is none.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.lowtide-installed
# An index or a version of one's own: make test PIP_FLAGS="torch==2.13.0"
PIP_FLAGS ?=

# What must also hold on the oldest torch that is supported.
FLOOR := torch==2.11.*
FLOOR_TESTS := tests/unit/test_law_one_process.py tests/unit/test_operators_run_again.py tests/unit/test_replay_steps.py \
	tests/distributed/test_law_sharded.py tests/distributed/test_checkpoint.py tests/e2e/test_examples.py

.PHONY: quickstart test full floor style types contract unit format clean env

quickstart: $(STAMP)
	$(BIN)/lowtide train examples/quickstart.yaml

test: style types contract unit

full: test
	$(BIN)/python -m pytest tests --run-full
	$(MAKE) floor

floor:
	test -x .venv-floor/bin/python || $(PYTHON) -m venv .venv-floor
	.venv-floor/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' '$(FLOOR)'
	.venv-floor/bin/python -m pytest $(FLOOR_TESTS)

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' $(PIP_FLAGS)
	touch $(STAMP)

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/basedpyright --pythonpath $(BIN)/python

contract: $(STAMP)
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/python -m pytest tests

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-floor build dist .pytest_cache .ruff_cache .hypothesis
