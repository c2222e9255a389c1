# The commands of this repository. `make help` lists them; `make demo` and `make test` are
# all a newcomer needs. Everything is installed into .venv. Outside the checkout, pip and
# pyright keep their caches, and tests make a random model once, in $XDG_CACHE_HOME/conure
# (or ~/.cache/conure).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := all,python,dev

# LlamaIndex's QueryPipeline went with core 0.13, which current integrations need: what is
# said of core 0.12 is tested in an environment of its own, and so are the lowest of the later cores.
LLAMAINDEX_012 := 0.12.52.post1
LLAMAINDEX_013 := 0.13.0
LLAMAINDEX_014 := 0.14.0

# torch 2.11 brings Triton 3.6, and what compiles well on one may spill on the other: the kernels
# are interpreted and compiled on both. The plain environment has 3.7.1.
KERNELS := .venv-triton36
KERNELS_TRITON := triton==3.6.0

# The LangChain adapter runs on every core 1.x: the newest is the one in .venv. The lowest one
# knows neither the newest langsmith nor the newest packaging.
LOWEST := .venv-langchain10
LOWEST_CORE := langchain-core==1.0.0

# Schemathesis has dependencies of its own, and only its command is used.
SCHEMATHESIS := .venv-schemathesis/bin/schemathesis

# A demo needs neither the tests nor the tools for the checks. It uses .venv where that is installed.
DEMO := $(if $(wildcard $(STAMP)),$(STAMP),.venv-demo/.installed)

# Exactly one torch fits: a looser request would bring another build than the tested one.
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)

# The default index has the CUDA build of torch, which brings several gigabytes of libraries. So the
# CPU build is installed, for the demo on every machine, for tests where no NVIDIA driver is loaded.
# If its index cannot be reached, torch comes from the configured ones.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
install_torch = $(1) -m pip install --quiet --no-compile -c constraints.txt $(TORCH)
install_cpu_torch = $(call install_torch,$(1)) --no-deps --retries 0 --timeout 15 \
    --extra-index-url $(TORCH_INDEX) || $(call install_torch,$(1))
install_test_torch = $(call \
    $(if $(wildcard /proc/driver/nvidia/version),install_torch,install_cpu_torch),$(1))

# About a hundred processes of the tests import torch. Without files of bytecode, each of them
# compiles its sources, which takes longer than everything else that an import does.
unexport PYTHONDONTWRITEBYTECODE

# Time that the tests of a folder may take on one core. What needs longer is marked `slow`,
# which `make test` leaves to `make test-all`.
#   tests/server 240 s · tests/engine 180 s · tests/kernels 240 s · tests/adapters 180 s
#   the others 180 s
# Files of tests go to two processes of one thread each. `check` runs the tests of the
# architecture, and `test-small-model` those of the built-in model, whose table is to be read.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --durations=15
SHARED := -n 2 --dist loadfile --max-worker-restart 0 \
    --ignore tests/examples/test_small_model.py --ignore tests/test_architecture.py
MARKS = -m 'not slow' $(HANG)

# pytest-timeout raises an error in a test. If the test or its fixtures go on waiting, this prints
# the stacks of all threads and ends the process. A slow test may take longer.
HANG := -o faulthandler_timeout=420 -o faulthandler_exit_on_timeout=true

# What `make test` runs beside the suite, because tests wait as well as compute. The suite shows
# its progress; the output of each of these is printed when it ends. Each runs, also after another
# has failed.
BESIDE := check test-llamaindex012 test-langchain10 test-small-model
TOGETHER := +@$(MAKE) --no-print-directory --jobs=2 --keep-going suite beside

.DEFAULT_GOAL := help
.PHONY: help setup check demo docs pip-matrix suite beside test test-all test-browser test-llamaindex012 \
    test-llamaindex013 test-llamaindex014 test-langchain10 test-small-model test-triton36 \
    chaos fuzz bench bench-kernels clean

help: ## list these commands
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "make %-18s %s\n", $$1, $$2}'

setup: $(STAMP) ## install Conure and its tools into .venv; quick when nothing changed

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    f"Conure needs Python 3.11 or newer, and $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call install_test_torch,$(BIN)/python)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

.venv-demo/.installed: pyproject.toml constraints.txt
	test -x .venv-demo/bin/python || $(PYTHON) -m venv .venv-demo
	$(call install_cpu_torch,.venv-demo/bin/python)
	.venv-demo/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[serve,langchain]'
	@touch $@

# What Sphinx needs of the package are its docstrings, for which the model libraries are not loaded.
.venv-docs/.installed: pyproject.toml constraints.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet -c constraints.txt -e '.[docs,langchain,llamaindex]'
	@touch $@

.venv-llamaindex%/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -v '^llama-index' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python .ci/requirements.py server llamaindex > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --no-compile -c $(@D)/constraints.txt \
	    -r $(@D)/requirements.txt 'llama-index-core==$(LLAMAINDEX_$*)' llguidance jsonschema \
	    hypothesis pytest pytest-asyncio pytest-timeout
	@touch $@

$(KERNELS)/.installed: pyproject.toml constraints.txt
	test -x $(KERNELS)/bin/python || $(PYTHON) -m venv $(KERNELS)
	grep -v '^triton' constraints.txt > $(KERNELS)/constraints.txt
	$(call install_test_torch,$(KERNELS)/bin/python)
	$(KERNELS)/bin/python -m pip install --quiet -c $(KERNELS)/constraints.txt -e . \
	    '$(KERNELS_TRITON)' numpy hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist sympy
	@touch $@

$(SCHEMATHESIS):
	$(PYTHON) -m venv .venv-schemathesis
	.venv-schemathesis/bin/python -m pip install --quiet schemathesis==4.32.5

$(LOWEST)/.installed: pyproject.toml constraints.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	grep -vE '^(langchain|langsmith|packaging)' constraints.txt > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python .ci/requirements.py server langchain > $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python -m pip install --quiet --no-compile -c $(LOWEST)/constraints.txt \
	    -r $(LOWEST)/requirements.txt '$(LOWEST_CORE)' llguidance jsonschema \
	    hypothesis pytest pytest-asyncio pytest-timeout
	@touch $@

check: setup ## lint, formatting, types and architecture
	@.ci/check

demo: $(DEMO) ## what a whole program gains, on the built-in model
	@$(dir $(DEMO))bin/conure demo

docs: .venv-docs/.installed ## the documentation as a site, in build/site
	.venv-docs/bin/sphinx-build -q -W --keep-going -c docs/site docs build/site
	@echo build/site/index.html

pip-matrix: ## the wheel with each extra in a fresh environment: every command works or names the extra
	$(PYTHON) .ci/pip_matrix.py

test: setup ## the checks, and every test that fits the time budget above
	$(TOGETHER)

test-all: setup docs test-llamaindex013 test-llamaindex014 test-triton36 ## the checks, and every test
	$(TOGETHER) MARKS=

suite: setup
	$(PYTEST) $(SHARED) $(MARKS)

beside:
	+@$(MAKE) --no-print-directory --output-sync=target $(BESIDE)

test-browser: setup ## the dashboard in a headless Chromium, which must be installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[browser]'
	$(BIN)/pytest -q tests/server/dashboard

# What core 0.12 says on import to a pydantic that is newer than it is not ours to mend.
test-llamaindex012: ## the LlamaIndex adapter on core 0.12
test-llamaindex013: ## the LlamaIndex adapter on core 0.13
test-llamaindex014: ## the LlamaIndex adapter on core 0.14.0
test-llamaindex012 test-llamaindex013 test-llamaindex014: \
test-llamaindex%: .venv-llamaindex%/.installed
	.venv-llamaindex$*/bin/python -m pytest -q $(HANG) --disable-warnings \
	    tests/adapters/llamaindex -W ignore::pydantic.warnings.UnsupportedFieldAttributeWarning

test-small-model: setup ## what the built-in model can do
	$(PYTEST) -q $(HANG) tests/examples/test_small_model.py

test-triton36: $(KERNELS)/.installed ## the kernels, interpreted and compiled by Triton 3.6.0
	OMP_NUM_THREADS=1 $(KERNELS)/bin/python -m pytest -q -n 2 --dist loadfile \
	    --max-worker-restart 0 $(MARKS) tests/kernels

test-langchain10: $(LOWEST)/.installed ## the LangChain adapter on core 1.0
	$(LOWEST)/bin/python -m pytest -q $(HANG) $(addprefix tests/adapters/langchain/, \
	    test_chat.py test_messages.py test_accelerate.py test_bad_input.py)

chaos: setup ## 500 damaged journals and 1,000 kills; takes an hour
	$(BIN)/python -m tests.server.store.damaged_journals --num 504
	$(BIN)/python -m tests.server.chaos --kills 1000

fuzz: setup $(SCHEMATHESIS) ## 500,000 mutated bodies, and requests from the API description
	CONURE_FUZZ_BODIES=500000 $(BIN)/pytest -q --timeout 0 -n auto \
	    tests/server/bounds/test_fuzz.py
	$(BIN)/python -m tests.server.bounds.openapi_cases --schemathesis $(SCHEMATHESIS)

bench: setup ## latency of chains and of wide programs over HTTP
	$(BIN)/python benchmarks/latency.py

bench-kernels: setup ## shared attention against its rivals, on a GPU where there is one
	$(BIN)/python benchmarks/kernels.py --out benchmarks/results/kernels

clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find adapters benchmarks engine examples kernels server tests -name __pycache__ -prune -exec rm -rf {} +
