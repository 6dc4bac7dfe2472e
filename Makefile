# Everything happens in .venv and build/. `make demo` and `make test` each do all of it on a fresh
# clone; they need git, make, g++ and python3 >= 3.11 with venv and headers.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
BUILD_TOOLS := scikit-build-core nanobind libucx-cu12 cmake ninja
EXTRAS := test,demo,ucx
NATIVE := $(shell find native -type f)
CPP := $(filter %.h %.cpp %.cu,$(NATIVE))
FLAGS ?=
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

.PHONY: help build demo test check test-native test-python test-nodes test-faults bench bench-peers
.PHONY: fmt generated test-sglang

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdxfer needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.tools: constraints.txt | $(BIN)/python
	$(PIP) $(BUILD_TOOLS)
	touch $@

# Python files are used where they lie; only a native or packaging change installs anew.
$(VENV)/.installed: $(VENV)/.tools pyproject.toml $(NATIVE)
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
	touch $@

build: $(VENV)/.installed  ## environment, dependencies, native modules

demo: build  ## a real model's cache crosses; FLAGS="--lane cma --embedded"
	$(BIN)/pdxfer demo $(FLAGS)

test: check test-native test-python  ## all checks and all tests

check: build  ## ruff, mypy, layers, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@echo clang-format --dry-run -Werror native; $(BIN)/clang-format --dry-run -Werror $(CPP)

define native_tests
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/cmake -S native -B build/native-$(1) -G Ninja \
	    -DPython_EXECUTABLE=$(abspath $(BIN))/python -DPDX_BUILD_TESTS=ON -DPDX_BUILD_PYTHON=OFF \
	    -DPDX_SANITIZE=$(2) $(if $(2),-DCMAKE_CXX_FLAGS_RELEASE=-O1) > build/native-$(1).log
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/cmake --build build/native-$(1) >> build/native-$(1).log \
	    || { tail -n 60 build/native-$(1).log; exit 1; }
	$(BIN)/ctest --test-dir build/native-$(1) -j$(JOBS) --no-tests=error --output-on-failure
endef

test-native: build  ## C++ tests: plain, ASan+UBSan, TSan
	mkdir -p build
	$(call native_tests,plain,)
	$(call native_tests,asan,address$(comma)undefined)
	$(call native_tests,tsan,thread)
comma := ,

test-python: build  ## pytest; FLAGS="-k name"
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(FLAGS)

test-faults: build  ## tests that kill, stop and cut
	@test -d tests/fault || { echo "make test-faults: there are no fault tests yet" >&2; exit 1; }
	$(BIN)/python -m pytest -m fault $(FLAGS)

test-sglang: build  ## pages and copies between SGLang's own pools and these, on a CPU
	$(BIN)/python tests/peers/run_sglang.py $(FLAGS)

test-nodes:  ## two nodes in network namespaces: not there yet
	@echo "make test-nodes: tests across network namespaces do not exist yet" >&2; exit 1

bench: build  ## GB/s and CPU beside memcpy, process_vm_writev and a raw TCP stream
	$(BIN)/pdxfer bench $(FLAGS)

bench-peers:  ## beside other transfer libraries: not there yet
	@echo "make bench-peers: a comparison with other transfer libraries does not exist yet" >&2; exit 1

fmt: build  ## put every file in its one form
	$(BIN)/ruff check --fix --exit-zero -q .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

generated: build  ## docs/limits.md and the stubs of the native modules
	PYTHONPATH=. $(BIN)/python tests/repo/generated.py
