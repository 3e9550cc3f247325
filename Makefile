# One virtual environment; each extra is installed when a target first needs it, at the versions of requirements.lock.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Once upon a time, in a small village by the sea,
STAGES ?= 2
BENCH ?=

.PHONY: run test lint bench lock clean

run: $(VENV)/.demo
	$(BIN)/memra-pp run --stages $(STAGES) --prompt "$(PROMPT)"

test: $(VENV)/.test
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	for bench in benchmarks/bench_*.py; do $(BIN)/python $$bench $(BENCH) || exit 1; done

lock:
	$(PYTHON) -m pip install --quiet uv
	uv pip compile --quiet --universal --python-version 3.11 --extra test --extra bench --output-file requirements.lock pyproject.toml

clean:
	rm -rf $(VENV)

$(VENV)/.%: pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[$*]'
	touch $@
