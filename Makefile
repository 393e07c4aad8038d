# Needs Python >= 3.10, make and a C++ compiler; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

.PHONY: install demo learn test nightly golden check format docs exactness mutants release clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# What waits for minutes, needs root, a compiler or a browser: Slurm, the simulated GPU, long sweeps.
nightly: $(READY)
	$(BIN)/python -m pytest -m nightly $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ty check albert_ds tools
	$(BIN)/python -m pytest --quiet tests/test_layers.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/demo/demo.sh

# make learn TEXT="wiki/*.txt" HOURS=2 [LEARN_ARGS="--tasks glue --minimal-pairs blimp/data"]
# A blank in a name: TEXT='my\ texts/*.txt'
HOURS ?= 2
learn: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/learn.py --text $(TEXT) --hours $(HOURS) \
	    --output runs/learn $(LEARN_ARGS)

# The documentation as a site in build/site: python -m http.server -d build/site
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The bits that commands leave, beside those recorded in tests/golden/golden.json.
golden: $(READY)
	$(BIN)/python -m tests.golden $(GOLDEN_ARGS)

exactness: $(READY)
	$(BIN)/python -m tests.exactness --output docs/exactness.md

mutants: $(READY)
	$(BIN)/python -m tests.mutants --output docs/raw/exactness.md

# sdist and wheel in build/release, checked and installed; nothing is uploaded.
release: $(READY)
	bash tools/release.sh $(BIN)/python

clean:
	rm -rf .venv demo
