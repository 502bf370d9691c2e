# `make demo` shows Holdfast at work, `make test` proves it; both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp

export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: setup test lint demo soak bench clean

# The dashboard's build looks by itself whether its sources have changed.
setup: $(STAMP)
	@$(BIN)/python api/dashboard/build.py

$(STAMP): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit("Holdfast needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What starts or kills real processes has the machine to itself.
test: lint
	$(BIN)/python api/dashboard/build.py test
	$(BIN)/pytest -m "not cluster and not chaos and not web and not soak" -n 2
	$(BIN)/pytest -m "(cluster or chaos or web) and not soak" --durations 15

demo: setup
	$(BIN)/holdfast demo

soak: setup
	$(BIN)/pytest -m soak

bench: setup
	$(BIN)/python -m benchmarks.recovery --json
	$(BIN)/python -m benchmarks.overhead --json

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf api/holdfast/dashboard api/dashboard/node_modules api/dashboard/src/api/schema.d.ts
