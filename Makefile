# Two commands do everything on a fresh machine with Python >= 3.10 and a C++17 compiler: `make train` and `make test`.
# The package is installed as a wheel into a virtual environment; tests never see the source folder.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
OUT ?= out
NPROC ?= 2
TRAIN_ARGS ?=
TEST_ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# Tests of several processes wait for each other: one worker more than cores keeps the cores busy.
TEST_JOBS ?= $(shell expr $(JOBS) + 1)

LINTED := python tests bench examples
SOURCES := $(shell find csrc cmake python bench -type f ! -name '*.so' ! -path '*__pycache__*') \
           CMakeLists.txt pyproject.toml README.md LICENSE

.PHONY: help venv build peers train test lint soak sanitize aarch64 cuda triton wheels try-wheel clean

help:
	@echo "make venv      virtual environment $(VENV) with $(TORCH)"
	@echo "make build     compile and install the package and the development tools into it"
	@echo "make train     train on $(NPROC) ranks, sequential beside nested, on built-in data; timeline in $(OUT)/step.html"
	@echo "make test      all tests on the installed package (NESTPIPE_TEST_DATA, NESTPIPE_TEST_ML100K: real data)"
	@echo "make lint      ruff, clang-format, mypy"
	@echo "make sanitize  native tests with address, undefined-behaviour and thread sanitizers"
	@echo "make aarch64   native tests of row arithmetic, cross-compiled, under qemu-user (g++-aarch64-linux-gnu)"
	@echo "make cuda      CUDA kernels as make build compiled them for sm_80, sm_90 and sm_100: registers, spills, 128-bit loads (needs nvcc, no GPU)"
	@echo "make wheels    wheels for every Python of WHEEL_PYTHONS in $(DIST): CPU, and with CUDA kernels where nvcc is"
	@echo "make try-wheel one of them beside every torch release of TRY_TORCH, each in an environment of its own (large downloads)"
	@echo "make triton    Triton kernels compiled for the same, with registers, spills and 128-bit loads (needs no GPU; Linux, x86-64)"
	@echo "make soak      the full product of test cases (long)"
	@echo "make peers     install TorchRec, FBGEMM, DeepCTR-Torch, torch-rechub, Mt-KaHyPar, PyTorch Lightning for comparisons and tests"
	@echo "make clean     remove everything that was built"

# torch goes first and pinned: what the package itself asks for would draw the newest build.
$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed, $(PYTHON) is %d.%d" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq '$(TORCH)'
	@touch $@

$(VENV)/.build: $(VENV)/.torch $(SOURCES)
	$(BIN)/python -m pip install -qq '.[dev]'
	@touch $@

$(VENV)/.peers: $(VENV)/.torch bench/peers.txt
	$(BIN)/python -m pip install -qq --no-deps -r bench/peers.txt
	@touch $@

venv: $(VENV)/.torch
build: $(VENV)/.build
peers: $(VENV)/.peers

train: build
	@mkdir -p $(OUT)
	$(BIN)/nestpipe train --nproc $(NPROC) --compare --timeline $(OUT)/step.html $(TRAIN_ARGS)

test: build
	$(BIN)/pytest -m 'not soak' -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

soak: build
	$(BIN)/pytest -m soak --timeout 3600 $(TEST_ARGS)

lint: build
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	find csrc tests/cpp tests/cuda -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

sanitize: build
	@for kind in address,undefined thread; do \
	  $(BIN)/cmake -S . -B build/sanitize-$$kind -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DNESTPIPE_PYTHON=OFF -DNESTPIPE_CUDA=OFF -DNESTPIPE_TESTS=ON -DNESTPIPE_SANITIZE=$$kind > /dev/null && \
	  $(BIN)/cmake --build build/sanitize-$$kind -j $(JOBS) && \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
	    $(BIN)/ctest --test-dir build/sanitize-$$kind -j $(JOBS) --output-on-failure || exit 1; \
	done

# Bits of results do not depend on the processor: the digests that x86 must have, too.
AARCH64_TESTS ?= test_golden test_rows test_keys test_key_index
aarch64: build
	$(BIN)/cmake -S . -B build/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -DNESTPIPE_PYTHON=OFF -DNESTPIPE_CUDA=OFF -DNESTPIPE_TESTS=ON > /dev/null
	$(BIN)/cmake --build build/aarch64 -j $(JOBS) --target $(AARCH64_TESTS)
	for name in $(AARCH64_TESTS); do qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/tests/cpp/$$name || exit 1; done

# No GPU is needed to compile. What was installed is looked at: a kernel that spills registers, or reads rows in small pieces, fails.
cuda: build
	extension=$$(find $(VENV)/lib -name '_cuda*.so'); \
	  test -n "$$extension" || { echo "no CUDA compiler was found by make build (nvcc on PATH, or CUDACXX)"; exit 1; }; \
	  $(BIN)/python tests/triton/sass.py $$extension

triton: build
	TRITON_INTERPRET=0 $(BIN)/python tests/triton/compile_kernels.py

DIST ?= dist
WHEEL_PYTHONS ?= $(or $(wildcard $(HOME)/.pyenv/versions/3.1[0-9]*/bin/python3),python3.10 python3.11 python3.12 python3.13)
wheels:
	bash cmake/make_wheels.sh $(DIST) $(WHEEL_PYTHONS)

TRY_TORCH ?= 2.11.0 2.13.0 2.14.0 2.15.0
TRY_PYTHON ?= $(PYTHON)
TRY_WHEEL ?= $(firstword $(wildcard $(DIST)/nestpipe_kernels-*-$(shell $(TRY_PYTHON) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-*.whl))
try-wheel:
	bash cmake/try_wheel.sh "$(TRY_WHEEL)" $(TRY_PYTHON) $(TRY_TORCH)

clean:
	rm -rf $(VENV) build $(OUT) $(DIST) .pytest_cache .mypy_cache .ruff_cache .hypothesis
