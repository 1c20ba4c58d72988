# All targets run in the virtual environment VENV, which PYTHON creates.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The versions to install; if empty, the newest ones that pyproject.toml permits.
CONSTRAINTS ?= constraints.txt
# Modules are compiled when they are first imported: most are never used.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile $(addprefix --constraint ,$(CONSTRAINTS))
export TOKENIZERS_PARALLELISM ?= false
# Tests start many programs, which would compile the package each time.
unexport PYTHONDONTWRITEBYTECODE
# Files of `make test`, `make test-long` and `make test-all`; all if empty.
TESTS ?=
# If set, `make package` downloads nothing.
OFFLINE ?=
# Folder of training and test data for `make model`.
BENCHMARKS ?= benchmarks

.DEFAULT_GOAL := help
.PHONY: help install demo model test test-long test-portable test-all check style package docs ablations bench bench-quick bench-gpu clean

help:  ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

install: $(INSTALLED)  ## Install the package and its test dependencies into .venv, with the tested versions

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP_INSTALL) --editable '.[test]'
	touch $@

demo: install  ## Train on the packaged bitext and write runs/demo/report.html (3 to 15 minutes on 2 cores)
	$(BIN)/metaphrase demo --config configs/demo.yaml --output_dir runs/demo

model: install  ## Train metaphrase-e5-small on the data in BENCHMARKS, and write its package and card (several hours on 2 cores)
	BIN=$(BIN)/ scripts/metaphrase_e5_small.sh $(BENCHMARKS)

test: install  ## Run the tests (7 minutes on 2 cores, no network)
	$(BIN)/python -m pytest -m 'not long and not slow and not gpu' -n 2 --junit-xml build/test.xml $(TESTS)

test-long: install  ## Run the tests of whole commands and trainings (3 minutes on 2 cores)
	$(BIN)/python -m pytest -m 'long and not slow and not gpu' -n 2 --junit-xml build/test-long.xml $(TESTS)

# The tests that depend on floating-point arithmetic, run under several instruction sets and numbers of threads. Not among
# them: files of tests of NumPy, MTEB and the forms of results, and a test that compares instruction sets itself.
NUMERIC := tests/aligners tests/evaluation tests/merging tests/mining/test_search.py tests/modeling tests/objectives \
	tests/training/test_loss.py $(addprefix --ignore=tests/evaluation/,suites test_compare.py test_mteb_tasks.py) \
	--deselect=tests/merging/test_vectors.py::test_merged_weights_do_not_depend_on_the_instruction_set
CAPABILITIES ?= default avx2 native
THREADS ?= 1 2

test-portable: install  ## Run the numeric tests under other CPU instruction sets, with 1 and 2 threads
	@for capability in $(CAPABILITIES); do for threads in $(THREADS); do \
		echo "ATEN_CPU_CAPABILITY=$$capability OMP_NUM_THREADS=$$threads"; \
		env $$(test $$capability = native || echo ATEN_CPU_CAPABILITY=$$capability) OMP_NUM_THREADS=$$threads \
			$(BIN)/python -m pytest -q -m 'not slow and not gpu' -n 2 $(NUMERIC) || exit 1; \
	done; done

$(VENV)/.all: $(INSTALLED)
	$(PIP_INSTALL) --editable '.[test-all]'
	touch $@

test-all: $(VENV)/.all  ## Run all tests, including the slow ones, and update docs/reference/faults.md (an hour on 2 cores)
	$(BIN)/python -m pytest -m 'not gpu' -n 2 --fault-table faults.jsonl $(TESTS)
	$(if $(TESTS),,$(BIN)/python scripts/reliability.py faults.jsonl)

$(VENV)/.dev: $(INSTALLED)
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

check: $(VENV)/.dev  ## Check lint, formatting, layers, types and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy
	$(BIN)/typos

style: $(VENV)/.dev  ## Fix lint and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

package: $(VENV)/.dev  ## Build the distributions in dist/, check them, and try the wheel in a new environment
	rm -rf dist build/package
	$(BIN)/python -m build $(if $(OFFLINE),--no-isolation) --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/package
	$(if $(OFFLINE),$(BIN)/python -c 'import site; print(*site.getsitepackages(), sep="\n")' > build/package/offline.pth)
	$(if $(OFFLINE),mv build/package/offline.pth build/package/lib/python3.*/site-packages)
	build/package/bin/python -m pip install --quiet $(if $(OFFLINE),--no-index --no-deps --force-reinstall) \
		--constraint constraints.txt dist/*.whl
	$(if $(OFFLINE),,build/package/bin/python -m pip check)
	build/package/bin/python -I scripts/try_wheel.py

$(VENV)/.docs: $(INSTALLED)
	$(PIP_INSTALL) --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs  ## Build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

ablations: install  ## Run two ablations on the demo's bitext (an hour on one core)
	$(BIN)/python scripts/ablations.py wacse-table10 --batch_size 6 --freeze_word_embeddings --keep
	$(BIN)/python scripts/ablations.py dap-fig3 --batch_size 8 --freeze_word_embeddings --vocabulary english --keep

bench: install  ## Measure speed and memory on a CPU, and write docs/speed.md (half an hour; an interrupted run resumes)
	$(BIN)/python scripts/benchmarks/run.py
	$(BIN)/python scripts/update_tables.py

bench-quick: install  ## Run the benchmark with fewer rounds and rows
	$(BIN)/python scripts/benchmarks/run.py --quick

bench-gpu: install  ## Run the benchmark on a CUDA device
	$(BIN)/python scripts/benchmarks/run.py --device cuda

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
