# Every target sets up .venv by itself. PYTHON picks the interpreter (3.11 to 3.14).
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3.14 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
SITE := build/docs-venv

.PHONY: demo test lint types check conformance fuzz torture page-check docs bench clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# One process a core, a file of tests at a time; `loadfile` keeps what a file's tests share in one process. Byte code is kept, also
# where the environment says otherwise: each process, and each program that a test starts, would compile the sources again.
test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder -m "not conformance and not fuzz and not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright
	$(BIN)/python -m pytest tests/repository/test_public_types.py

check: lint types test

conformance: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 32 --dist worksteal -m conformance

fuzz: $(STAMP)
	$(BIN)/python -m pytest -m fuzz

torture: $(STAMP)
	$(BIN)/python tests/helpers/torture_cache.py

# Opens the page of `perf --html` in a browser and looks at it; says what is missing if there is no browser or no axe-core.
page-check: $(STAMP)
	$(BIN)/python tests/helpers/page_check.py

# Builds the site into build/site, in an environment of its own that has no torch. A misspelt word, a broken link or an unknown name ends it.
docs: $(SITE)/.installed
	$(SITE)/bin/codespell *.md docs
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet

bench: $(STAMP)
	$(BIN)/python benchmarks/limits.py
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/cpu.py --shapes
	$(BIN)/python benchmarks/thread.py
	$(BIN)/python benchmarks/w4.py
	$(BIN)/python benchmarks/models.py
	$(BIN)/python benchmarks/computed.py
	$(BIN)/python benchmarks/idle.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "torch>=2.11"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

$(SITE)/.installed: docs/requirements.txt constraints.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement docs/requirements.txt
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache
