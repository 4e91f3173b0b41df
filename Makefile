# The two commands: `make quickstart` trains a model, `make test` is everything CI runs.
# Each makes its own environment in .venv when there is none.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.lowtide-installed
# An index or a version of one's own: make test PIP_FLAGS="torch==2.13.0"
PIP_FLAGS ?=

.PHONY: quickstart test full style types contract unit examples format clean env

quickstart: $(STAMP)
	$(BIN)/lowtide train examples/quickstart.yaml

test: style types contract unit

full: test
	$(BIN)/python -m pytest tests --run-full
	$(BIN)/python tests/smoke/torch_floor.py

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
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
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
