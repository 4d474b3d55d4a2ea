# `make demo` and `make test` are enough to begin with; both set up .venv on first use.
#
# PYTHON   the Python that makes the environment, or that runs everything where it has CUDA torch and triton itself
# ARGS     options for the command, e.g. `make demo ARGS="--shape deepseek-v4-flash"`
PYTHON ?= python3
ARGS ?=
WORKERS ?= 2

VENV := .venv
VENV36 := .venv36
TORCH := 2.13.0
TRITON36 := 3.6.0

# The top-level folder kernels/ must not be importable by that name: other packages look for a `kernels` of theirs.
export PYTHONSAFEPATH := 1

WITH_SRC := PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH}
SYSTEM_GPU := $(PYTHON) -c 'import click, rich, torch, triton; exit(not torch.cuda.is_available())' 2>/dev/null

# The CPU build has no CUDA libraries and, unlike the other one, leaves triton's version open.
install_cpu_torch = $(1)/bin/pip install -q 'torch==$(TORCH)+cpu' 2>/dev/null || \
	$(1)/bin/pip install -q --index-url https://download.pytorch.org/whl/cpu 'torch==$(TORCH)'

.PHONY: demo test lint codegen gpu-test install clean

demo:  ## every backend on every served recipe: errors, times, launches
	@if $(SYSTEM_GPU); then \
		$(WITH_SRC) $(PYTHON) -m megamoe demo $(ARGS); \
	else \
		$(MAKE) --no-print-directory install && $(VENV)/bin/python -m megamoe demo $(ARGS); \
	fi

test: install  ## the whole suite; GPU tests skip where there is none
	@$(VENV)/bin/python -m pytest -n $(WORKERS) $(ARGS)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

codegen: install $(VENV36)/.installed  ## compile every kernel for sm_90, sm_100 and sm_120 under both Tritons; no GPU needed
	$(VENV)/bin/python -m megamoe codegen --json bench/results/codegen_triton39.json $(ARGS)
	$(WITH_SRC) $(VENV36)/bin/python -m megamoe codegen --json bench/results/codegen_triton36.json $(ARGS)

gpu-test:  ## the whole suite on this machine's GPU, with the Python that has CUDA torch (and pytest)
	$(WITH_SRC) $(PYTHON) -m pytest $(ARGS)

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@echo "setting up $(VENV), once; this takes a few minutes"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null; then \
		$(VENV)/bin/pip install -q -e '.[dev]'; \
	else \
		$(call install_cpu_torch,$(VENV)) && $(VENV)/bin/pip install -q -e '.[cpu,dev]'; \
	fi
	@touch $@

$(VENV36)/.installed: Makefile
	@echo "setting up $(VENV36), once"
	@test -x $(VENV36)/bin/python || $(PYTHON) -m venv $(VENV36)
	@$(call install_cpu_torch,$(VENV36))
	@$(VENV36)/bin/pip install -q 'triton==$(TRITON36)' numpy click rich
	@touch $@

clean:
	rm -rf $(VENV) $(VENV36) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
