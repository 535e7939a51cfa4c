# Everything from a fresh clone with Python 3.11 or 3.12, pip and make.
#   make train                     create .venv if needed, then train the default job
#   make train ARGS="algo=ppo ..." anything else that launch/train.py understands
#   make test | slow | check       fast tests | slow tests | lint, format and types
# Variables: PYTHON (interpreter that creates .venv), VENV, PIP_ARGS (for example an extra package index).
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?= algo=tracess env=safety-gym
ROOMS := $(wildcard envs rollouts rewards trainers algos evaluators stages launch benchmarks)

# More threads than free cores make torch many times slower on small machines.
export OMP_NUM_THREADS ?= 1

.PHONY: train test slow check format install clean
train: $(STAMP)
	@$(BIN)/python launch/train.py $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

slow: $(STAMP)
	@$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(ROOMS)

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

install: $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache

# The stamp is written last, so an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints/cpu.txt constraints/no-deps.txt | $(BIN)/python
	@echo "seedbed: installing into $(VENV) (a few minutes, once)"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) \
	    -c constraints/cpu.txt '.[safety,language,data,dev]'
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps $(PIP_ARGS) \
	    -r constraints/no-deps.txt
	@rm -rf build seedbed.egg-info
	@touch $@

# Debian's Python may lack ensurepip; then its pip fills an environment made without one.
$(BIN)/python:
	@found=; \
	suits() { "$$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; }; \
	for python in $(or $(PYTHON),python3 python3.12 python3.11 python); do \
	    if suits $$python; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "seedbed needs Python 3.11 or 3.12; $(or $(PYTHON),python3) here is" \
	        "$$($(or $(PYTHON),python3) --version 2>&1 || true)." >&2; \
	    echo "Install one of them, or say where it is: make $(or $(MAKECMDGOALS),train) PYTHON=/path/to/python3.12" >&2; \
	    exit 1; \
	fi; \
	echo "seedbed: creating $(VENV) with $$($$found --version)"; \
	$$found -m venv --clear $(VENV) >/dev/null 2>&1 || { \
	    $$found -m venv --clear --without-pip $(VENV) && \
	    $$found -m pip --python $(VENV)/bin/python install --quiet pip; } || \
	{ rm -rf $(VENV); exit 1; }
