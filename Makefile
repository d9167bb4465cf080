# Everything runs in .venv, which is made from requirements.lock when that changes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-more bench lint format clean

demo: $(READY)  ## train FedDAR beside FedAvg on the built-in synthetic hospital cohort
	$(BIN)/feddar run exam --versus fedavg

test: lint  ## lint, strict types, tests; those that start whole federations one after another
	$(BIN)/pytest -n 2 -m "not slow and not more"
	$(BIN)/pytest -m "slow and not more"

test-more: $(READY)  ## what is exhaustive: every method on every engine, every fault and the tutorial word for word
	$(BIN)/pytest -n 2 -m "more and not slow"
	$(BIN)/pytest -m "more and slow"

bench: $(READY)  ## measure ratios and refresh docs/performance.md; ONLY="images linear" for some of them
	$(BIN)/python -m benchmarks $(ONLY)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| (echo "feddar needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" && exit 1)
	@echo "Installing into .venv (once; the download is about 610 MB)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
