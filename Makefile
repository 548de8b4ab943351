# Two commands do all the set-up: `make bench` and `make test`. Both need Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STUBS := $(VENV)/stubs
# Where the shell forbids Python to keep what it has compiled, each of the tests' hundreds of processes compiles PyTorch anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: bench test lint style types tests slow lock clean

bench: $(STAMP)
	$(BIN)/python run.py model=nasnet system=nimble batch=1

test: style
	$(MAKE) --no-print-directory -j 2 types tests

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

tests: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# What takes minutes by itself: processes that are killed, compilers, long training, and drawn examples three times as many.
slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --hypothesis-profile=thorough \
	  -m "(slow or hypothesis) and not gpu"

# The stamp is written last, so that an interrupted install is taken up again and a finished one is never repeated. Nothing is
# compiled: of 6 GB of packages a run imports a part, which Python compiles then. The lock file names all there is to install, so
# that two installers can share it.
$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Opweave needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	tr '\n' '\0' < requirements.lock | xargs -0 -P 2 -n 12 \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
# TensorRT's type stubs, for mypy alone: they require TensorRT, which PyPI does not hold, and as published they do not parse.
	rm -rf $(STUBS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(STUBS) tensorrt-stubs==10.13.0.35.1
	sed -i.published -E 's/([(, ])in: list/\1in_: list/; s/= None, channel_axis: int\)/= None, channel_axis: int = ...)/' \
	  $(STUBS)/tensorrt_bindings/tensorrt.pyi
	touch $@

# After a change of the dependencies in pyproject.toml.
lock:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra onnx --extra tvm --extra windtunnel --universal --python-version 3.11 --no-header --no-annotate --quiet --output-file requirements.lock

clean:
	rm -rf $(VENV)
