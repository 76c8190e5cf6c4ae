# Every target sets up what it needs: a machine with Python 3.11, make and a C compiler is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench

.PHONY: help demo test check bench clean

help:
	@echo "make demo    train on handwritten digits for about a minute, and say where the page is"
	@echo "make test    run every test"
	@echo "make check   format, lint, types, tests"
	@echo "make bench   measure speed and memory against a hand-written loop and the peers"

demo: $(READY)
	$(BIN)/anybatch train digits

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

bench: $(BENCH_READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing anybatch and what its tests need into $(VENV) (once, a minute or two)"
	$(PIP) -e '.[test,check]'
	@touch $@

$(BENCH_READY): $(READY)
	@echo "installing the peers that the benchmarks compare with into $(VENV) (once)"
	$(PIP) -e '.[bench]'
	@touch $@
