# What a newcomer runs first: `make demo`, then `make test`.
# Everything is installed into .venv; `make PYTHON=python3.12 demo` picks another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test lint types bench clean

help:
	@echo "make demo    a traced engine serves eight prompts of a small real model"
	@echo "make test    all tests"
	@echo "make lint    ruff and strict mypy"
	@echo "make bench   benchmarks, side by side with peers"
	@echo "make clean   remove .venv and build output"

demo: $(VENV)/.demo
	$(BIN)/sgl-aspects demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the engine and the exporters into $(VENV) (about 1 GB, mostly PyTorch) ..."
	$(PIP) -e ".[runtime,otlp]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the development tools into $(VENV) ..."
	$(PIP) -e ".[dev]"
	@touch $@
