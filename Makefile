# make test and make demo work on a fresh machine: they set up .venv first. ARGS="..." is passed on to the command.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# uv does it in a quarter of the time, from where pip is set up to; pip does it where uv cannot.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --index-strategy unsafe-best-match --constraint constraints.txt
settings = eval "$$($(BIN)/python -m pip config list | $(BIN)/python -c "$$SETTINGS")"
install = { { $(settings) && $(UV) $(1) 2>/dev/null; } || $(PIP) $(1); }
define SETTINGS
import ast, shlex, sys
names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_EXTRA_INDEX_URL", "find-links": "UV_FIND_LINKS"}
for line in sorted(sys.stdin, reverse=True):  # what the environment says comes last
    key, _, value = line.strip().partition("=")
    name = names.get(key.rpartition(".")[2])
    if name:
        separator = "," if name == "UV_FIND_LINKS" else " "
        print("export", name + "=" + shlex.quote(separator.join(ast.literal_eval(value).split())))
endef
export SETTINGS
# CUDA builds of torch bring their own triton; for the CPU build, on Linux, this one runs the kernels' interpreter tests.
TRITON := triton>=3.6,<=3.9.0
# The kernels are to compile with the oldest that pyproject.toml allows too: make test-all has it in a folder beside the
# environment's own. Where there is none for this Python, the test that reads them with it is skipped.
OLDEST_TRITON := triton==3.6.0
WITH_OLDEST := $(VENV)/.oldest-triton
# Ray is 79 MB and a process of its own for each of its parts: without it, make test leaves its tests out.
WITH_RAY := $(VENV)/.ray
WITH_FORMATS := $(VENV)/.formats
# With a comma, at which a call in a makefile would be cut.
SELF := .[dev,docs]
# Compiling torch's 1000 modules takes longer than running them: done while the rest is installed.
TORCH_BYTECODE := PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import torch._dynamo" 2>/dev/null

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-faults test-formats test-ray test-versions test-newest compatibility test-gpu docs lint format bench plots clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

$(READY): pyproject.toml constraints.txt Makefile
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing what constraints.txt pins into $(VENV)"
	@$(PIP) uv 2>/dev/null || true
	@$(call install,torch hatchling)
	@$(TORCH_BYTECODE) & \
	{ test "$$(uname -s)" != Linux || $(BIN)/python -c "import triton" 2>/dev/null || $(call install,"$(TRITON)"); } \
	&& $(call install,--no-build-isolation --editable "$(SELF)"); installed=$$?; wait; exit $$installed
	@touch $@

demo: $(READY)  ## digits drawn and a text continued, stock and optimized: accel-demo.png and tables
	$(BIN)/python -m accel demo $(ARGS)

# Nothing is compiled at installing, so the first to import a module keeps its byte code, even where the shell says not
# to: without it each of the many processes that tests start would compile torch anew, for 4 to 13 seconds. To rewrite
# every assert so that it tells its values takes each worker 3 seconds: done for those that failed, which run once more.
TEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
test: $(READY)  ## every test that needs no GPU
	$(TEST) --assert=plain $(ARGS) || { $(TEST) --last-failed --last-failed-no-failures none $(ARGS); exit 1; }

$(WITH_OLDEST): $(READY)
	@test "$$(uname -s)" != Linux || $(PIP) --no-deps --target $(VENV)/oldest-triton "$(OLDEST_TRITON)" || true
	@touch $@

test-all: $(WITH_OLDEST)  ## test, with every product of families and modes, and docs/measurements/compatibility.md written anew
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 ACCEL_TEST_EVERYTHING=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-faults: $(READY)  ## which of the faults in tests/faults the tests see (ARGS="kv-* --jobs 2")
	$(BIN)/python -m tests.faults $(ARGS)

# Once torchao is there, every process that imports transformers imports it too, for a second or two.
$(WITH_FORMATS): $(READY)
	@echo "installing torchao and optimum-quanto into $(VENV)"
	@$(call install,--no-build-isolation --editable ".[formats]")
	@touch $@

test-formats: $(WITH_FORMATS)  ## the tests of linears in the formats of torchao and Quanto, which it installs
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/diffusion tests/quantization tests/llm/ptq/formats/test_state_dict.py -k "formats" $(ARGS)

$(WITH_RAY): $(READY)
	@echo "installing ray into $(VENV)"
	@$(call install,--no-build-isolation --editable ".[ray]")
	@touch $@

test-ray: $(WITH_RAY)  ## the tests of replicas under Ray Serve, which it installs
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest tests/replicas tests/core/test_examples.py -k ray $(ARGS)

# SETS="oldest newest" runs these alone. Two of them have a CUDA build of torch: 6 GB each.
test-versions: $(READY)  ## the suite under the oldest, pinned and newest versions, and docs/measurements/versions.md of them
	@$(settings) && $(BIN)/python tests/support/version_sets.py $(SETS) --pytest="$(ARGS)"

test-newest: $(READY)  ## the tests that touch the libraries under their newest versions, where these are not pinned
	@$(settings) && $(BIN)/python tests/support/version_sets.py libraries --pytest="$(ARGS)"

compatibility: $(READY)  ## docs/measurements/compatibility.md: every model of transformers and diffusers, stock and optimized
	OMP_NUM_THREADS=1 ACCEL_TEST_EVERYTHING=1 $(BIN)/python -m pytest tests/compatibility $(ARGS)

test-gpu:  ## the tests that need a GPU, in the Python that has one (PYTHON=...); makes no environment
	PYTHONPATH=.:kernels $(PYTHON) -m pytest tests/gpu $(ARGS)

# NO_MKDOCS_2_WARNING silences what the theme says of its successor.
docs: $(READY)  ## the documentation as a site, in build/site; warnings are errors (Python 3.11 and later)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

lint: $(READY)  ## ruff, rules and format, the types, and docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/support/docstrings.py

format: $(READY)  ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench:  ## stock, accel and torch.compile side by side, in the Python that has a GPU (ARGS="sd15 vae1024")
	PYTHONPATH=.:kernels $(PYTHON) -m accel bench $(ARGS)

plots: $(READY)  ## draw docs/images from benchmarks/results
	$(BIN)/python -m benchmarks plots

clean:  ## remove what was built and cached; environments stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis accel-demo.png
	find accel kernels tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
