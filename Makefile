# Everything runs in .venv, made from nothing with constraints.txt; a second call installs nothing.
PYTHON ?= python3.11
SEED ?= 1
SGLANG_CACHE ?= build
MINUTES ?= 60
VENV ?= .venv
BIN := $(VENV)/bin
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
PACKAGES := schemas bus kernels sandbox weight_sync rollout_agent trainer deploy
STRICT := schemas bus weight_sync deploy
TYPED := build/typed

.PHONY: demo test lint bench sglang crash-matrix soak borrowed clean
.DELETE_ON_ERROR:

demo: $(VENV)/.with-plot
	$(BIN)/headway up --config deploy/demo.toml --set run.seed=$(SEED) --set run.name=demo-$(SEED)

test: $(VENV)/.with-test
	$(ONE_THREAD) $(BIN)/python -P -m pytest

lint: $(VENV)/.with-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED) && mkdir -p $(TYPED)/headway && cp -r $(PACKAGES) $(TYPED)/headway
	cd $(TYPED) && MYPYPATH=. $(abspath $(BIN))/mypy --strict --follow-imports=silent --explicit-package-bases \
	  --config-file $(abspath pyproject.toml) $(STRICT:%=-p headway.%)
	cd $(TYPED) && PYTHONPATH=. $(abspath $(BIN))/lint-imports --no-logo $(abspath pyproject.toml)

# All but tests/bench/staleness.py, which takes about an hour.
bench: $(VENV)/.with-test
	for script in $(filter-out %/staleness.py,$(wildcard tests/bench/*.py)); do $(ONE_THREAD) $(BIN)/python -P $$script || exit 1; done

# SGLang's own environment for a CPU (3 GB), once for each set of pins; build/sglang points at it.
sglang:
	place=$$(PYTHON=$(PYTHON) deploy/sglang/build.sh $(SGLANG_CACHE)) && mkdir -p build && ln -sfn "$$place" build/sglang

# Kills real processes at every fail point and stamps docs/RELIABILITY.md; about half an hour.
crash-matrix: $(VENV)/.with-test
	$(ONE_THREAD) $(BIN)/python -P -m pytest tests/chaos/test_crash_matrix.py --crash-matrix -k whole

# A fault every 20 seconds for MINUTES, then the audit, memory, and what leaked.
soak: $(VENV)/.with-test
	$(ONE_THREAD) $(BIN)/python -P tests/chaos/soak.py --minutes $(MINUTES)

# Real processes, half of whose agents come and go; ten minutes, whatever MINUTES is.
borrowed: $(VENV)/.with-test
	$(ONE_THREAD) $(BIN)/python -P tests/chaos/borrowed.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.with-plot: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[plot]'
	touch $@

$(VENV)/.with-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[plot,test,lint]'
	touch $@ $(VENV)/.with-plot

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
