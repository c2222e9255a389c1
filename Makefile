# The commands of this repository. `make help` lists them; `make demo` and `make test` are
# all a newcomer needs. Everything is installed into .venv. Outside the checkout, pip and
# pyright keep their caches, and tests make a random model once, in $XDG_CACHE_HOME/conure
# (or ~/.cache/conure).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := server,engine,langchain,llamaindex,dev

# LlamaIndex's QueryPipeline went with core 0.13, which current integrations need: what is
# said of core 0.12 is tested in an environment of its own.
OLD := .venv-llamaindex012
OLD_CORE := llama-index-core==0.12.52.post1

# Exactly one torch fits: a looser request would bring another build than the tested one.
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)

# Time that the tests of a folder may take on 2 cores. What needs longer is marked `slow`,
# which `make test` leaves to `make test-all`.
#   tests/server 180 s · tests/engine 120 s · tests/kernels 240 s · tests/adapters 90 s
#   tests/*.py (house, README) 90 s · checks 60 s · altogether 810 s
PYTEST := $(BIN)/pytest --durations=15

.DEFAULT_GOAL := help
.PHONY: help setup check demo test test-all test-llamaindex012 bench bench-kernels clean

help: ## list these commands
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "make %-18s %s\n", $$1, $$2}'

setup: $(STAMP) ## install Conure and its tools into .venv; quick when nothing changed

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    f"Conure needs Python 3.11 or newer, and $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

$(OLD)/.installed: pyproject.toml constraints.txt
	test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	grep -v '^llama-index' constraints.txt > $(OLD)/constraints.txt
	$(OLD)/bin/python -m pip install --quiet --no-compile -c $(OLD)/constraints.txt \
	    -e '.[server,llamaindex]' '$(OLD_CORE)' llguidance jsonschema \
	    hypothesis pytest pytest-asyncio pytest-timeout
	@touch $@

check: setup ## lint, formatting, types and architecture
	@.ci/check

demo: setup ## a LangChain map-reduce on the built-in model, as one program and by request
	@.ci/demo

test: check test-llamaindex012 ## the checks, then every test that fits the time budget above
	$(PYTEST) -m 'not slow'

test-all: check test-llamaindex012 ## the checks, then every test
	$(PYTEST)

# What core 0.12 says on import to a pydantic that is newer than it is not ours to mend.
test-llamaindex012: $(OLD)/.installed ## the LlamaIndex adapter on core 0.12
	$(OLD)/bin/python -m pytest -q --disable-warnings tests/adapters/llamaindex \
	    -W ignore::pydantic.warnings.UnsupportedFieldAttributeWarning

bench: setup ## latency of chains and of wide programs over HTTP
	$(BIN)/python benchmarks/latency.py

bench-kernels: setup ## shared attention against its rivals, on a GPU where there is one
	$(BIN)/python benchmarks/kernels.py --out benchmarks/results

clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist .src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find adapters benchmarks engine examples kernels server tests -name __pycache__ -prune -exec rm -rf {} +
