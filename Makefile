# People and CI call the same targets; `make help` lists them.
VENV ?= .venv
PYTHON ?= python3
SEED ?=
NAME ?= recovery
FAULTS ?= 300
ARGS ?=
# Files of tests are handed out whole, in the order of tests/conftest.py. Jobs wait now and then: three at a time.
SHARE := --dist loadfile --no-loadscope-reorder

# uv does not read pip's variables: lend it the wheel folder where there is one.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

PY := $(VENV)/bin/python
READY := $(VENV)/.ready
UV := $(shell command -v uv 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help setup ext demo quick test slurm check fix docs soak bench clean

help:  ## say what each target does
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## a virtual environment in .venv with everything

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "torchrelay needs Python 3.11 or newer: make setup PYTHON=python3.11")'
ifneq ($(UV),)
	test -x $(PY) || $(UV) venv --python $(PYTHON) $(VENV)
	$(UV) pip install --python $(PY) -c constraints.txt -e '.[dev]'
else
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
endif
	@touch $(READY)

ext: $(READY)  ## build the C++ part that swaps communicators (once per torch version; optional)
	$(PY) -m torchrelay.worker.process_groups.groups build

demo: $(READY)  ## train a GPT, kill and hang its workers, and prove that not a bit changed
	$(PY) -m examples.demo $(ARGS)

quick: $(READY)  ## the fast tests only
	$(PY) -m pytest -q -x $(SHARE) -n 2 -m 'not slow and not gpu and not soak' $(ARGS)

test: $(READY)  ## all tests that need no GPU; SEED=7 replays one simulated schedule
ifneq ($(SEED),)
	$(PY) -m torchrelay.simulation --seed $(SEED) --story
else
	$(PY) -m pytest -q $(SHARE) -n 2 -m 'not jobs and not gpu and not soak' $(ARGS)
	$(PY) -m pytest -q $(SHARE) -n 3 -m 'jobs and not gpu and not soak' $(ARGS)
endif

slurm: $(READY)  ## the tests on a real Slurm (root; apt-get install slurmctld slurmd slurm-client munge)
	$(PY) -m pytest -m slurm $(ARGS)

check: $(READY)  ## style, types, architecture
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(PY) -m tests.english
	$(PY) -m tests.modules_page
	$(PY) -m tests.phases_page

fix: $(READY)  ## format, and repair what a machine can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(PY) -m tests.modules_page --write
	$(PY) -m tests.phases_page --write

docs: $(READY)  ## build the site into build/site; a dead link is an error
ifneq ($(UV),)
	$(UV) pip install -q --python $(PY) -c constraints.txt -e '.[docs]'
else
	$(PY) -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[docs]'
endif
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -q

soak: $(READY)  ## 100,000 simulated schedules, then FAULTS=300 faults and moves on real processes, and the cells covered
	$(PY) -m torchrelay.simulation --seeds 100000 --jobs 2
	$(PY) -m tests.matrix --faults $(FAULTS) $(ARGS)
	$(PY) -m tests.matrix --silent
	$(PY) -m pytest -m soak

bench: $(READY)  ## one bench: NAME=recovery runs bench/recovery.py
	@test -f bench/$(NAME).py || { echo "no bench/$(NAME).py; there are: $(basename $(notdir $(wildcard bench/*.py)))" >&2; exit 2; }
	$(PY) bench/$(NAME).py $(ARGS)

clean:  ## remove what was built and what runs left behind (not .venv)
	rm -rf build dist demo-report.json demo-report.png torchrelay-runs .pytest_cache .mypy_cache .ruff_cache \
	    .import_linter_cache .hypothesis src/*.egg-info
	find src tests bench examples -name __pycache__ -type d -exec rm -rf {} +
