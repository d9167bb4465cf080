# Everything runs in .venv, which is made from requirements.lock when that changes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DOCS := .venv-docs
BUILDER := html

.PHONY: demo test test-more docs bench bench-gpu lint format package clean

demo: $(READY)  ## train FedDAR beside FedAvg on the built-in synthetic hospital cohort
	$(BIN)/feddar run exam --versus fedavg

test: lint  ## lint, strict types, tests; those that start whole federations one after another
	$(BIN)/pytest -n 2 -m "not slow and not more"
	$(BIN)/pytest -m "slow and not more"

test-more: $(READY)  ## what is exhaustive: every method on every engine, every fault and the tutorial word for word
	$(BIN)/pytest -n 2 -m "more and not slow"
	$(BIN)/pytest -m "more and slow"

docs: $(DOCS)/.ready  ## the site, into docs/_build/html; tutorials are executed, and a warning is an error; BUILDER=linkcheck asks other sites
	PATH="$(CURDIR)/.venv/bin:$$PATH" PYTHONPATH="$(CURDIR)/src" OMP_NUM_THREADS=1 \
		$(DOCS)/bin/sphinx-build --quiet --nitpicky --fail-on-warning --keep-going --fresh-env \
		--builder $(BUILDER) --doctree-dir docs/_build/doctrees docs docs/_build/$(BUILDER)
	@echo "Written: docs/_build/$(BUILDER)"

bench: $(READY)  ## measure ratios and refresh docs/performance.md; ONLY="images linear" for some of them
	$(BIN)/python -m benchmarks $(ONLY)

bench-gpu: $(READY)  ## the same ratios on a CUDA GPU, if there is one
	$(BIN)/python -m benchmarks gpu

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

package:  ## the sdist, and the wheel made from it, into dist/; PYTHON needs pip and hatchling
	rm -rf dist
	$(PYTHON) -m hatchling build --target sdist --directory dist
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz

clean:
	rm -rf .venv $(DOCS) docs/_build

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| (echo "feddar needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" && exit 1)
	@echo "Installing into .venv (once; the download is about 610 MB)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Sphinx and Jupyter are beside .venv, not in it, and find there what they share with feddar.
$(DOCS)/.ready: docs/requirements.txt $(READY)
	rm -rf $(DOCS)
	$(BIN)/python -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r docs/requirements.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(DOCS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/feddar.pth"
	@touch $@
