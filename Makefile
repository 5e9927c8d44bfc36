# make serve    install into .venv, fetch the default model, serve on 127.0.0.1:8000
# make test     the same environment plus test tools; everything that needs no GPU
# Needs Python 3.11 or newer with pip and venv, nothing else. Nothing is installed again until pyproject.toml or
# constraints.txt changes. Caches follow JAXSERVE_CACHE and XDG_CACHE_HOME; PIP_* settings are pip's own.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help serve test test-mosaic ray-test check-python lint format clean distclean

MODEL ?= smollm2-135m
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
PYTEST_ARGS ?=

# With PYTHON=python3.12 the environment is .venv-3.12, so that versions live side by side; without, the first
# interpreter that is new enough is taken and the environment is .venv.
ifeq ($(origin PYTHON),undefined)
  CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11 python
  VENV_SUFFIX :=
else
  CANDIDATES := $(PYTHON)
  VENV_SUFFIX = -$(PYTHON_VERSION)
endif

# "<command> <version>", nothing if no candidate is new enough. pyenv's shims stand in the PATH for versions that
# are not activated: those are looked up in pyenv's own folder.
FOUND := $(shell for name in $(CANDIDATES); do \
    for command in "$$name" "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin/"$$name"; do \
      version=$$("$$command" -c 'import sys; v = sys.version_info; v >= (3, 11) and print("%d.%d" % v[:2])' \
        2>/dev/null) || continue; \
      if [ -n "$$version" ]; then echo "$$command $$version"; exit 0; fi; \
    done; \
  done)
PYTHON_COMMAND := $(firstword $(FOUND))
PYTHON_VERSION := $(word 2,$(FOUND))

VENV ?= .venv$(VENV_SUFFIX)
BIN := $(VENV)/bin
MADE := $(VENV)/.made-$(PYTHON_VERSION)
SERVE_READY := $(VENV)/.ready-serve
TEST_READY := $(VENV)/.ready-test
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

help:  ## what can be made
	@echo "make serve [MODEL=$(MODEL)] [PORT=$(PORT)] [ARGS=...]   install and serve (jaxserve serve --help lists ARGS)"
	@echo "make test [PYTHON=python3.12] [PYTEST_ARGS=...]     install with test tools; lint, import rules, tests"
	@echo "make ray-test                                        a local Ray cluster: two replicas, one is lost"
	@echo "make lint | format | clean | distclean"

serve: $(SERVE_READY)
	exec $(BIN)/jaxserve serve "$(MODEL)" --host "$(HOST)" --port "$(PORT)" $(ARGS)

# The tests of the GPU kernels take one core for minutes, the others seldom use two: they run side by side, and the
# output of the former comes last. (Not $(MAKE): make -n runs every line that has it.)
MOSAIC_LOG := build/test-mosaic.log

test: lint
ifneq ($(PYTEST_ARGS),)
	$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	@mkdir -p build
	@nice $(MAKE_COMMAND) --no-print-directory test-mosaic > $(MOSAIC_LOG) 2>&1 & mosaic=$$!; \
	  trap 'kill $$mosaic; exit 130' INT TERM; status=0; $(BIN)/python -m pytest || status=$$?; \
	  wait $$mosaic || status=$$?; cat $(MOSAIC_LOG); exit $$status
endif

# The GPU kernels run in an interpreter that came with JAX 0.12, which needs Python 3.12. An older main environment
# gets a second one beside it, with what those tests need and nothing else.
MOSAIC_COMMAND := $(shell for name in python3.12 python3.13 python3.14 python3; do \
    for command in "$$name" "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin/"$$name"; do \
      "$$command" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || continue; \
      echo "$$command"; exit 0; \
    done; \
  done)
MOSAIC_VENV ?= .venv-mosaic
MOSAIC_READY := $(MOSAIC_VENV)/.ready

test-mosaic:  ## GPU kernels in the interpreter
	@if "$(BIN)/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then \
	  echo "The GPU kernels were tested with the rest: this environment has Python 3.12 or newer."; \
	elif [ -z "$(MOSAIC_COMMAND)" ]; then \
	  echo "NOT RUN: tests/mosaic (GPU kernels in the interpreter) needs Python 3.12 or newer, and none was found."; \
	else \
	  $(MAKE) --no-print-directory $(MOSAIC_READY) && \
	  exec "$(MOSAIC_VENV)/bin/python" -m pytest -p no:cacheprovider tests/mosaic; \
	fi

$(MOSAIC_READY): pyproject.toml constraints.txt
	@echo "Making $(MOSAIC_VENV) with $(MOSAIC_COMMAND) for the tests of the GPU kernels (once; about a minute)"
	@rm -rf "$(MOSAIC_VENV)"
	@"$(MOSAIC_COMMAND)" -m venv "$(MOSAIC_VENV)"
	@"$(MOSAIC_VENV)/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  jax numpy pytest pytest-timeout hypothesis
	@"$(MOSAIC_VENV)/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch "$@"

RAY_READY := $(VENV)/.ready-ray

ray-test: $(RAY_READY)  ## a local Ray cluster: two replicas, one is lost, serving goes on
	$(BIN)/python -m pytest tests/ray -m ray -s $(PYTEST_ARGS)

$(RAY_READY): $(TEST_READY)
	@echo "Installing Ray Serve into $(VENV) (once; some hundred MB)"
	@$(INSTALL) -e '.[test,ray]' || { echo "The installation failed: pip's message is above." >&2; exit 1; }
	@touch "$@"

# import-linter walks one folder per package; here the namespace is spread over five, so it gets them as one.
lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/imports && mkdir -p build/imports && cp -r jaxserve build/imports/
	cp -r models pallas_kernels server sharding build/imports/jaxserve/
	cd build/imports && PYTHONPATH=. "$(abspath $(BIN))/lint-imports" --no-cache ../../pyproject.toml

format: $(TEST_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check-python:
	@if [ -z "$(PYTHON_COMMAND)" ]; then \
	  echo "jaxserve needs Python 3.11 or newer. Looked for: $(CANDIDATES)." >&2; \
	  for name in $(CANDIDATES); do \
	    seen=$$("$$name" --version 2>/dev/null) && echo "  $$name is $$seen" >&2; \
	  done; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3 ..." >&2; exit 1; \
	fi
	@if ! "$(PYTHON_COMMAND)" -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "$(PYTHON_COMMAND) has no venv or ensurepip module (Debian and Ubuntu: install python3-venv)." >&2; \
	  exit 1; \
	fi

# A changed interpreter version has another stamp, so that the folder is made anew.
$(MADE): | check-python
	@echo "Making $(VENV) with Python $(PYTHON_VERSION)"
	@rm -rf "$(VENV)"
	@"$(PYTHON_COMMAND)" -m venv "$(VENV)"
	@touch "$@"

$(SERVE_READY): $(MADE) pyproject.toml constraints.txt
	@echo "Installing jaxserve into $(VENV) (once; about a minute)"
	@$(INSTALL) -e . || { echo "The installation failed: pip's message is above." >&2; exit 1; }
	@touch "$@"

$(TEST_READY): $(MADE) pyproject.toml constraints.txt
	@echo "Installing jaxserve and its test tools into $(VENV) (once; about a minute)"
	@$(INSTALL) -e '.[test]' || { echo "The installation failed: pip's message is above." >&2; exit 1; }
	@touch "$(SERVE_READY)" "$@"

clean:  ## what tools leave behind; environments stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-*
