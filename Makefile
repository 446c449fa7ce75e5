# The two commands a newcomer needs are `make demo` and `make test`. Each installs what it uses.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# One worker per core of CI; each takes the next file in the order of tests/conftest.py.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

PAGES := $(foreach path,$(wildcard tutorials/[0-9]*.py),build/tutorials/$(firstword $(subst _, ,$(notdir $(path)))).md)

.PHONY: demo test test-all check docs site bench install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: install
	$(BIN)/python -m recipes.sl_basic $(ARGS)

# Quick: the core, without tests that start whole programs or train for minutes. Tests of optional
# features (LEAF_TESTS in tests/conftest.py) are in test-all alone.
test: install
	$(BIN)/python -m pytest $(WORKERS) -m "not slow and not leaf" $(ARGS)

test-all: install
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The site with executed tutorials, and a copy that opens without a server. Runs the tutorials that
# have no page or have changed (two minutes for all); `make test-all` has written pages of all.
docs: $(PAGES) site
	mkdir -p dist
	$(BIN)/python -m zipfile -c dist/docs.zip build/site

# The same with the pages of tutorials that there are. Checks every link.
site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 PATH="$(BIN):$$PATH" $(BIN)/mkdocs build --strict

# tutorials/101_hello_tinker.py gives build/tutorials/101.md, in the form of commands.py.
.SECONDEXPANSION:
$(PAGES): build/tutorials/%.md: $$(wildcard tutorials/%_*.py) tutorials/commands.py | $(VENV)/.installed
	$(BIN)/python -m tinker_cookbook.tutorials render output=$(@D) only=$*

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	touch $@

bench: install
	$(BIN)/python -m benchmarks.engine $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info
