# `make demo` runs the demonstration, `make test` every check, `make screenshots` renews the pictures of the
# documentation; each sets up a virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
CHECK_PYTHON := import sys; sys.exit("Holdfast needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)

export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
# Compiled modules are kept: the checks start thousands of processes.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup test test-quick test-affected test-all cluster-test frameworks lint lint-types lint-style test-dashboard screenshots demo demo-elastic soak bench gpu clean

# build.py builds only if the sources of the dashboard, or of the API that it uses, have changed.
setup: $(STAMP)
	@echo "Building the dashboard, if its sources have changed (up to a minute)"
	@$(BIN)/python api/dashboard/build.py
ifeq ($(or $(MAKECMDGOALS),setup),setup)
	@echo "Done: type \`. $(VENV)/bin/activate\`, then \`holdfast demo\`, or \`holdfast run --local -- train.py\`"
endif

# One line per stage; pip itself is quiet and reports errors only.
$(STAMP): requirements.lock pyproject.toml
	@test -x $(BIN)/python || { $(PYTHON) -c '$(CHECK_PYTHON)' && echo "Creating $(VENV)" && $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c '$(CHECK_PYTHON)'
	@echo "Installing $$(grep -c == requirements.lock) pinned packages (two to three minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@echo "Installing Holdfast itself"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

lint: lint-types lint-style

# Apart, so that they run beside each other.
lint-types: setup
	$(BIN)/mypy

lint-style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

test-dashboard: setup
	$(BIN)/python api/dashboard/build.py test

# What CONTRIBUTING.md says of each suite; the marks are in tests/support/suites/selection.py. Tests that
# start or kill real processes run alone, after the others. JUNIT keeps what each test cost.
REPORTS := build/tests
JUNIT = --junit-xml $(REPORTS)/$@-$(1).xml
# A crash of a worker is a failure at once: replaced workers would wait for each other for ever.
QUICK = $(BIN)/pytest -n 2 --max-worker-restart 0 --dist loadgroup $(call JUNIT,quick)
REAL = $(BIN)/pytest $(call JUNIT,real) --durations 20

test: setup
	$(MAKE) --no-print-directory -j 2 -O lint-types lint-style test-dashboard
	$(QUICK) --suite quick
	$(REAL) --suite real

# For the loop of editing: neither types, nor a browser, a server of databases or real processes.
test-quick: setup
	$(BIN)/ruff check .
	$(QUICK) --suite inner

# Every test that the change since BASE can reach: make test-affected BASE=main
test-affected: setup
	@test -n "$(BASE)" || { echo "name a commit: make test-affected BASE=HEAD for what is not committed" >&2; exit 2; }
	$(QUICK) --suite all-quick --affected $(BASE)
	$(REAL) --suite all-real --affected $(BASE)

# Every test but the soak, or the K-th of N parts of them: make test-all PART=2/4
test-all: setup
	$(QUICK) --suite all-quick $(if $(PART),--part $(PART))
	$(REAL) --suite all-real $(if $(PART),--part $(PART))
	$(BIN)/pytest $(call JUNIT,frameworks) -m frameworks $(if $(PART),--part $(PART))

# Several machines in a box: needs root, `ip` and `unshare`. A part of it is in `make test`.
cluster-test: setup
	HOLDFAST_NO_SKIPS=1 $(BIN)/pytest tests/machine_room --durations 10

# Every page in light, dark and on a phone, checked as in `make test`: its pictures are left in build/gallery,
# and those in docs/screenshots are renewed.
screenshots: setup
	HOLDFAST_SCREENSHOTS=1 HOLDFAST_NO_SKIPS=1 $(BIN)/pytest tests/web/test_every_page.py

demo: setup
	$(BIN)/holdfast demo

demo-elastic: setup
	$(BIN)/holdfast demo --elastic

# Training frameworks in environments of their own, which pip installs into build/frameworks.
frameworks: setup
	$(BIN)/pytest -m frameworks tests/frameworks --durations 20

soak: setup
	$(BIN)/pytest -m soak

bench: setup
	$(BIN)/python -m benchmarks.recovery --json
	$(BIN)/python -m benchmarks.overhead --json
	$(BIN)/python -m benchmarks.elastic --json
	$(BIN)/python -m benchmarks.data --json

# On a machine with a GPU, in at most ten minutes. The pinned torch may be one without CUDA, so this
# takes the Python that is there.
gpu:
	PYTHONPATH=workers $(PYTHON) -m benchmarks.gpu --json

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf api/holdfast/dashboard api/dashboard/node_modules api/dashboard/src/api/schema.d.ts \
		api/dashboard/src/api/faults.json api/dashboard/src/api/metrics.json
