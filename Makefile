# `make` alone lists the targets. Needs python3 (3.11 or later) with pip and venv; nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
VLLM   := .venv-vllm
SHARE  ?= 1
SEED   ?=
N      ?= 20
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-slow test-hard test-races test-vllm lint format lock bench-loss bench-align bench-on-policy gpu-check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install the locked versions (again only when they changed)

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("potstill needs Python 3.11 or later, and $(PYTHON) is %d.%d: choose another, as in `make setup PYTHON=python3.12`" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "could not create $(VENV): on Debian and Ubuntu, install python3-venv first" >&2; exit 1; }
	@echo "Installing the locked versions into $(VENV); the first time takes a few minutes ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
	@echo "Installed. The command is $(BIN)/potstill"

quickstart: setup  ## distil the shipped teacher into a small student, end to end
	$(BIN)/potstill quickstart

test: lint  ## lint, types, and all tests but the slow ones
	$(BIN)/mypy src
	$(PYTEST) -m "not slow and not hard and not vllm"

test-slow: setup  ## the slow tests (AGAIN=--last-failed: those that failed)
	$(PYTEST) -m "slow and not hard and not vllm" $(AGAIN)

# SHARE makes it smaller, SEED repeats one; benchmarks/results/reliability.json keeps the figures of a whole one.
test-hard: setup  ## kills, damages, full disks, fuzzed inputs, load and soak; about half an hour (SHARE=0.2: less)
	POTSTILL_HARD_SHARE=$(SHARE) POTSTILL_HARD_SEED=$(SEED) $(PYTEST) -m hard -rP tests/hard
	@test "$(SHARE)" != 1 || $(BIN)/python tests/hard/figures.py

test-races: setup  ## the tests with processes, signals, sockets or threads, N=20 times on a busy machine
	$(BIN)/python tests/races.py $(N)

test-vllm:  ## the tests with a real vLLM, in an environment of its own (3 minutes to install, the first time)
	@PYTHON=$(PYTHON) tools/setup_vllm $(VLLM)
	POTSTILL_NEEDS_VLLM=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VLLM)/bin/pytest -m vllm

lint: setup  ## ruff, and the house rules (tools/check_house.py); nothing is changed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_house.py

format: setup  ## ruff: mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch is fixed here because 2.13.0 has builds for machines with and without CUDA; transformers stays below 5.20
# because vLLM, which users may add, asks for that. hatchling and editables are what `pip install -e .` builds with.
LOCK_TORCH := torch==2.13.0
LOCK_ALSO  := 'transformers<5.20' hatchling editables

lock:  ## resolve anew and write requirements.lock (needs the network)
	@echo "Resolving in a fresh .venv-lock; takes a few minutes ..."
	@rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/pip install -qq --disable-pip-version-check $(LOCK_TORCH)
	@.venv-lock/bin/pip install -qq --disable-pip-version-check $(LOCK_TORCH) $(LOCK_ALSO) '.[dev]'
	@{ echo "# Written by \`make lock\`: every version that \`make setup\` installs."; \
	   echo "$(LOCK_TORCH)"; \
	   .venv-lock/bin/pip freeze --all --exclude pip --exclude potstill --exclude torch | sed -e 's/+[a-z0-9.]*$$//' -e 's/^triton==.*/&; sys_platform == "linux"/'; \
	 } > requirements.lock.new
	@mv requirements.lock.new requirements.lock
	@rm -rf .venv-lock
	@echo "requirements.lock: $$(grep -c == requirements.lock) packages"

bench-loss: setup  ## the loss beside its peers, which are installed first; resumes, about an hour
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c requirements.lock --no-build-isolation -e '.[bench]'
	$(BIN)/python benchmarks/loss.py

bench-align: setup  ## alignment beside TRL's, and a step with another tokenizer; needs real tokenizers (POTSTILL_ASSETS)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c requirements.lock --no-build-isolation -e '.[bench]'
	$(BIN)/python benchmarks/align.py
	$(BIN)/python benchmarks/align_steps.py

bench-on-policy: setup  ## on-policy steps beside TRL's, and the server under load; needs real tokenizers (POTSTILL_ASSETS)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c requirements.lock --no-build-isolation -e '.[bench]'
	$(BIN)/python benchmarks/on_policy.py --work runs/bench-on-policy

gpu-check: setup  ## on a machine with a GPU: kernels, steps, speed; under ten minutes, writes gpu-check.json to send in
	$(BIN)/python -W ignore benchmarks/gpu_check.py

clean:  ## remove .venv, .venv-vllm, caches and build outputs; runs/ is kept
	rm -rf $(VENV) $(VLLM) .venv-lock build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
