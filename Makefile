# Every target sets up what it needs: a machine with Python 3.11, make and a C++ compiler is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
ACCELERATOR := $(VENV)/.ready-accelerator
BENCH_READY := $(VENV)/.ready-bench
CHROMIUM := /usr/bin/chromium

# what tests start again and again is compiled once
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -n 2 --no-loadscope-reorder

.PHONY: help demo learn test test-torch quick check docs bench clean

help:
	@echo "make demo    install, train on handwritten digits, say where the page is: about a minute"
	@echo "make learn   open the lessons: gradient accumulation, done by you"
	@echo "make test    run every test; format, lint and types are among them"
	@echo "make test-torch TORCH=2.15.0   run every test with another torch, in a venv of its own"
	@echo "make quick   run the tests of the core; with PACKAGE=memory, what a change to that package needs"
	@echo "make docs    build the site of the docs into site/"
	@echo "make bench   measure speed and memory against a hand-written loop and the peers"

# The digits are too small to share between threads: two that wait for each other are slower than one.
demo: $(DEMO_READY)
	OMP_NUM_THREADS=1 $(BIN)/anybatch train digits

learn: $(DEMO_READY)
	$(BIN)/anybatch learn

test: $(READY) $(ACCELERATOR) | $(CHROMIUM)
	$(PYTEST)

# With another torch, and with PYTHON=python3.13 another Python; with PACKAGE=parallel one package. torch as pip installs it is a CUDA build of some 4 GB, which needs no GPU.
TORCH ?= 2.15.0
OTHER := .venv-torch-$(TORCH)-$(notdir $(PYTHON))

test-torch: | $(CHROMIUM)
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@echo "installing torch $(TORCH) and what the tests need into $(OTHER) (once)"
	grep -v '^torch==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHER)/constraints.txt 'torch==$(TORCH)' -e '.[test,check,docs]'
	$(OTHER)/bin/python -m pytest -n 2 --no-loadscope-reorder $(PACKAGE:%=tests/%)

# The tests of the core but the longest, which need torch and pytest alone; of another package all its tests and examples, the structure, lint and types.
PACKAGE ?= $(ROOM)

quick: $(READY)
ifneq ($(filter-out core,$(PACKAGE)),)
	$(PYTEST) $(wildcard tests/$(PACKAGE) tests/test_$(PACKAGE).py src/anybatch/$(PACKAGE) src/anybatch/$(PACKAGE).py) tests/house
else
	$(PYTEST) --quick tests/core
endif

check: test

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "site: site/index.html"

bench: $(BENCH_READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV)

$(DEMO_READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing anybatch and its command line into $(VENV) (once, about a minute)"
	$(PIP) -e '.[all]'
	@touch $@

$(READY): $(DEMO_READY)
	@echo "installing what the tests need into $(VENV) (once, a minute or two)"
	$(PIP) -e '.[test,check,docs]'
	@touch $@

# What runs on a GPU is tested on a device of our own.
$(ACCELERATOR): $(READY) tests/accelerator/building.py $(wildcard tests/accelerator/csrc/*)
	@echo "compiling the pretend accelerator, on which device code is tested (once, half a minute)"
	$(BIN)/python -m tests.accelerator.building
	@touch $@

# The pages are tested in a real browser.
$(CHROMIUM):
	@echo "installing chromium, in which the pages are tested (once)"
	@if ! command -v apt-get >/dev/null; then root=none; elif [ "$$(id -u)" = 0 ]; then root=env; \
	elif command -v sudo >/dev/null; then root="sudo env"; else root=none; fi; \
	if [ "$$root" != none ]; then $$root DEBIAN_FRONTEND=noninteractive apt-get update -qq; \
	$$root DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; fi; \
	test -x $@ || { echo "$@ is missing and cannot be installed from here; install Chromium so that it is $@ (Debian: \
	apt-get install chromium), then run make test again." >&2; exit 1; }

$(BENCH_READY): $(READY)
	@echo "installing the peers that the benchmarks compare with into $(VENV) (once)"
	$(PIP) -e '.[bench]'
	@touch $@
