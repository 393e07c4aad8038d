# Everything from a bare clone: Python >= 3.10, make and a C compiler are all that must be there.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

.PHONY: install demo test slow check format exactness mutants clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# What waits for minutes: a true time limit on the cluster of tests/slurm.
slow: $(READY)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ty check albert_ds tools
	$(BIN)/python -m pytest --quiet tests/test_layers.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/demo.sh

exactness: $(READY)
	$(BIN)/python -m tests.exactness --output docs/exactness.md

mutants: $(READY)
	$(BIN)/python -m tests.mutants --output docs/exactness.md

clean:
	rm -rf .venv demo
