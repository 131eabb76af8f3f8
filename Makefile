# What a person runs in a checkout. `make` alone lists the targets.
# Variables: PYTHON (3.11 or later), VENV (a folder for the virtual environment), FUZZ_SECONDS.

PYTHON ?= python3
VENV ?= .venv
FUZZ_SECONDS ?= 600

BIN := $(VENV)/bin
WHEELS := build/wheel
PIP := $(BIN)/pip --disable-pip-version-check
CHECK_MACHINE := $(PYTHON) tools/check_machine.py
EDITABLE := $(wildcard $(VENV)/.editable)
JOBS := -j$(shell nproc)

# What an installation is made of; an editable one puts built files into the package too.
SOURCES := setup.py pyproject.toml MANIFEST.in README.md LICENSE NOTICE tools/check_machine.py \
    $(shell find include libtinyloop tinyloop_py -type f ! -name '*.so' ! -path '*/.*' \
        ! -path '*/__pycache__/*' ! -path 'tinyloop_py/lib/*' ! -path 'tinyloop_py/include/*')
C_FILES := $(shell find include libtinyloop tests $(wildcard examples) -name '*.[ch]' -o -name '*.cpp')
PYTHON_FILES := setup.py tools tinyloop_py tests $(wildcard bench examples)

# The C tests in a debug build under AddressSanitizer and UndefinedBehaviorSanitizer.
ASAN := -C tests/c BUILD=$(abspath build/asan) SANITIZE=address,undefined

# ThreadSanitizer cannot map its shadow where the kernel randomises addresses strongly.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: help demo test lint format sanitize soak fuzz bench dev clean check-python
.DELETE_ON_ERROR:

help:
	@echo 'make demo      build, install into $(VENV), and show prefix pools at work'
	@echo 'make test      C tests, then ABI and Python tests of the installed wheel, and its own'
	@echo 'make lint      formatters and static checks'
	@echo 'make format    let the formatters rewrite the sources'
	@echo 'make sanitize  C tests under AddressSanitizer + UBSan and under ThreadSanitizer'
	@echo 'make soak      minutes of registrations, generations and threads with flat memory'
	@echo 'make fuzz      libFuzzer over the reader of model files, for FUZZ_SECONDS (600)'
	@echo 'make bench     benchmarks against PyTorch and llama.cpp; table, JSON and plot'
	@echo 'make dev       editable install: changes to Python files need no new install'
	@echo 'make clean     remove what was built, the virtual environment too'

demo: $(VENV)/.installed
	@$(BIN)/tinyloop demo

test: $(VENV)/.test-tools
	@$(CHECK_MACHINE) test sanitize
	@echo '==> C tests'
	@$(MAKE) --no-print-directory $(JOBS) -C tests/c programs BUILD=$(abspath build/c)
	@$(MAKE) --no-print-directory -C tests/c run BUILD=$(abspath build/c)
	@echo '==> Hostile calls under AddressSanitizer, where released handles are told'
	@$(MAKE) --no-print-directory $(JOBS) $(ASAN) $(abspath build/asan)/test_hostile
	@$(MAKE) --no-print-directory $(ASAN) run PROGRAMS=$(abspath build/asan)/test_hostile
	@echo '==> Python, ABI and wheel tests'
	@$(if $(EDITABLE),,TINYLOOP_WHEEL="$$(echo $(WHEELS)/*.whl)") $(BIN)/pytest

lint: $(VENV)/.lint-tools
	@echo '==> clang-format'
	@$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	@echo '==> ruff'
	@$(BIN)/ruff check --quiet $(PYTHON_FILES)
	@$(BIN)/ruff format --quiet --check $(PYTHON_FILES)
	@echo '==> cython-lint'
	@# It calls another program of the environment by its bare name.
	@PATH="$(abspath $(BIN)):$$PATH" cython-lint tinyloop_py
	@echo '==> mypy'
	@$(BIN)/mypy --no-error-summary
	@# From another folder: the package that is installed, which has the built module.
	@cd $(VENV) && bin/stubtest --mypy-config-file $(CURDIR)/pyproject.toml tinyloop_py._caches \
	    tinyloop_py._core

format: $(VENV)/.lint-tools
	$(BIN)/clang-format -i $(C_FILES)
	$(BIN)/ruff check --quiet --fix $(PYTHON_FILES)
	$(BIN)/ruff format --quiet $(PYTHON_FILES)

sanitize: check-python
	@$(CHECK_MACHINE) sanitize
	@echo '==> C tests under AddressSanitizer and UndefinedBehaviorSanitizer'
	@$(MAKE) --no-print-directory $(JOBS) $(ASAN) programs
	@$(MAKE) --no-print-directory $(ASAN) run
	@echo '==> C tests under ThreadSanitizer'
	@$(MAKE) --no-print-directory $(JOBS) -C tests/c programs BUILD=$(abspath build/tsan) \
	    SANITIZE=thread
	@$(MAKE) --no-print-directory -C tests/c run BUILD=$(abspath build/tsan) SANITIZE=thread \
	    RUNNER='$(NO_ASLR)'

soak: $(VENV)/.test-tools
	@$(CHECK_MACHINE) test
	@echo '==> The tables of a pool after each of a million calls'
	@$(MAKE) --no-print-directory $(JOBS) -C tests/c $(abspath build/c)/test_pool_tables \
	    BUILD=$(abspath build/c)
	@TINYLOOP_TEST_CALLS=1000000 build/c/test_pool_tables
	@echo '==> Registrations, generations, and a minute of eight threads'
	@$(BIN)/python tests/py/soak.py

fuzz: check-python
	@$(CHECK_MACHINE) fuzz
	@$(MAKE) --no-print-directory $(JOBS) -C tests/fuzz build BUILD=$(abspath build/fuzz)
	@echo '==> Fuzzing the reader of model files for $(FUZZ_SECONDS) seconds'
	@$(MAKE) --no-print-directory -C tests/fuzz run BUILD=$(abspath build/fuzz) \
	    SECONDS=$(FUZZ_SECONDS)

bench: $(VENV)/.bench-tools
	@$(BIN)/python bench/bench.py --out build/bench

dev: $(VENV)/.created
	@test -e $(VENV)/.editable || { rm -f $(VENV)/.installed; touch $(VENV)/.editable; }
	@$(MAKE) --no-print-directory $(VENV)/.test-tools $(VENV)/.lint-tools

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf tinyloop_py/lib tinyloop_py/include tinyloop_py/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- Inside: the virtual environment, in steps that are redone when their sources change ----------

check-python:
	@command -v $(PYTHON) >/dev/null || { echo 'missing: Python 3.11 or later' \
	    '(Debian, Ubuntu: apt-get install python3; Fedora: dnf install python3)'; exit 1; }

$(VENV)/.created: | check-python
	@$(CHECK_MACHINE) build venv
	@echo '==> Creating a virtual environment in $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# What is tested is the file that would be shipped.
$(WHEELS)/.built: $(SOURCES) | $(VENV)/.created
	@rm -rf $(WHEELS)
	@echo '==> Building libtinyloop'
	@$(MAKE) --no-print-directory $(JOBS) -C libtinyloop lib
	@echo '==> Building the wheel of tinyloop_py, fetching what that needs'
	@$(PIP) wheel -qq --no-deps --wheel-dir $(WHEELS) .
	@touch $@

ifdef EDITABLE
$(VENV)/.installed: $(SOURCES) | $(VENV)/.created
	@echo '==> Building and installing tinyloop_py, fetching the packages that it needs'
	@$(PIP) install -qq --editable .
	@touch $@
else
$(VENV)/.installed: $(WHEELS)/.built | $(VENV)/.created
	@echo '==> Installing the wheel, fetching the packages that it needs'
	@# pip would keep what is installed in the same version.
	@$(PIP) uninstall -qq --yes tinyloop-py
	@$(PIP) install -qq $(WHEELS)/*.whl
	@touch $@
endif

# The package is there already; this brings what its extras name.
$(VENV)/.%-tools: $(VENV)/.installed
	@echo '==> Fetching the tools for $*'
	@$(PIP) install -qq 'tinyloop-py[$*]'
	@touch $@
