# `make demo` to see it, `make test` and `make check` to trust it. Everything is installed into .venv, through constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A folder with data sets beside the checkout is used if there is one; tests that need data are skipped without.
ifneq ($(wildcard ../shared/data),)
export HOLDFAST_DATA ?= $(abspath ../shared/data)
endif

.PHONY: demo federation test check torture docs format constraints clean

demo: $(VENV)/.installed
	$(BIN)/holdfast run configs/demo.toml --method fedavg --out runs/demo-fedavg
	$(BIN)/holdfast run configs/demo.toml --method lga --out runs/demo-lga
	$(BIN)/holdfast run configs/demo.toml --method kelp --out runs/demo-kelp
	$(BIN)/holdfast show runs/demo-fedavg runs/demo-lga runs/demo-kelp --picture runs/demo.png
	@echo "pictures: runs/demo.png, runs/demo-lga/prototypes.png"

federation: $(VENV)/.installed-dev
	$(BIN)/python scripts/federation.py

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

torture: $(VENV)/.installed-dev
	$(BIN)/python scripts/torture.py kills --kills 50
	$(BIN)/python scripts/torture.py bad-clients
	$(BIN)/python scripts/torture.py soak
	$(BIN)/python scripts/torture.py table
	$(BIN)/python scripts/federation.py --kills 20
	$(BIN)/python scripts/fuzz.py --inputs 1000000

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site: build/site/index.html"

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Keeps the versions that are pinned already where the requirements allow them; delete a line first to get the newest.
constraints: $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt uv
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --fork-strategy fewest --no-annotate -o constraints.txt

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Holdfast needs Python 3.11 or newer, and $(PYTHON) is older; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,deploy,live,onnx]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@
