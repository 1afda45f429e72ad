# make demo   train, export, build and measure an FP16 and an NVFP4 UNet on generated data, and print the table
# make test   formatting, lint, types and tests
# Each makes its own virtual environment in .venv from nothing.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test install install-dev clean

demo: install
	$(BIN)/fp4deploy run --demo

test: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) --editable '.[rtx]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable '.[rtx,dev,examples]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
