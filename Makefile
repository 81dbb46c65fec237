# Every target sets up .venv by itself. PYTHON picks the interpreter (3.11 to 3.14).
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3.14 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lint types check conformance fuzz torture bench clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# One process a core, a file of tests at a time; `loadfile` keeps what a file's tests share in one process.
test: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder -m "not conformance and not fuzz and not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

check: lint types test

conformance: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 32 --dist worksteal -m conformance

fuzz: $(STAMP)
	$(BIN)/python -m pytest -m fuzz

torture: $(STAMP)
	$(BIN)/python tests/helpers/torture_cache.py

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

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache
