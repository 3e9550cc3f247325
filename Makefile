# One virtual environment; each extra is installed when a target first needs it, at the versions of requirements.lock.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Once upon a time, in a small village by the sea,
STAGES ?= 2
BENCH ?=
SECONDS_EACH ?= 600
KILLS ?= 94
SOAK_S ?= 3600

.PHONY: run test test-cluster lint docs bench fuzz chaos soak lock clean

run: $(VENV)/.demo
	$(BIN)/memra-pp run --stages $(STAGES) --prompt "$(PROMPT)"

test: $(VENV)/.test
	$(BIN)/python -m pytest

# What takes longer, or needs more than Python: Ray nodes, jobs, a server, a browser.
test-cluster: $(VENV)/.cluster
	command -v chromium >/dev/null || { apt-get update && apt-get install -y chromium; }
	$(BIN)/python -m pytest -m cluster

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going docs build/docs

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	for bench in benchmarks/bench_*.py; do $(BIN)/python $$bench $(BENCH) || exit 1; done

# An hour of sessions that come and go in every way.
soak: $(VENV)/.bench
	$(BIN)/python benchmarks/bench_soak.py --seconds $(SOAK_S)

# Each reader of bytes from outside, one after the other.
fuzz: $(VENV)/.fuzz
	for target in $$($(BIN)/python -c "from fuzz.targets import TARGETS; print(*TARGETS)"); do \
		echo "$$target" && $(BIN)/python -m fuzz.run $$target $(SECONDS_EACH) || exit 1; done

# Stages that are killed and stopped while sessions stream: of a tiny model, and of the real one.
chaos: $(VENV)/.test
	$(BIN)/python cluster/chaos.py --model tests/data/hybrid --stages 3 --kills $(KILLS) --seed 1
	$(BIN)/python cluster/chaos.py --stages 2 --kills 6 --seed 2

lock:
	$(PYTHON) -m pip install --quiet uv
	uv pip compile --quiet --universal --python-version 3.11 --extra test --extra bench --extra fuzz --extra cluster --extra docs --output-file requirements.lock pyproject.toml

clean:
	rm -rf $(VENV)

$(VENV)/.%: pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[$*]'
	touch $@
