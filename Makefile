# Two commands do everything: `make quickstart` and `make test`.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
DEMO := out/demo

.PHONY: quickstart test lint docs install clean

quickstart: install
	rm -rf $(DEMO)-w4a8-lqq $(DEMO)-w4a8-lqq.partial
	$(BIN)/qtool plan demo --scheme w4a8-lqq --recipe best
	$(BIN)/qtool quantize demo --scheme w4a8-lqq --recipe best --samples 32 --out $(DEMO)-w4a8-lqq
	$(BIN)/qtool verify $(DEMO)-w4a8-lqq
	$(BIN)/qtool eval demo demo_choice --model $(DEMO)-w4a8-lqq --compare demo

test: install lint docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the site, in site/; every link, anchor and table must hold
docs: install
	$(BIN)/python benchmarks/tables.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

install: $(VENV)/.installed

# torch first: an exact version, so that the index's CPU build is taken where it offers one
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,serving,docs]'
	touch $@

# vLLM's CUDA wheel beside torch for CPUs: its loaders and layers run, its kernels do not
SERVING ?= .venv-serving
VLLM ?= 0.26.0

.PHONY: test-serving
test-serving: $(SERVING)/.installed
	OMP_NUM_THREADS=1 $(SERVING)/bin/python -m pytest tests/serving

$(SERVING)/.installed: pyproject.toml constraints.txt tests/serving/packages.txt
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(SERVING)/bin/pip install --quiet --disable-pip-version-check -r tests/serving/requirements.txt
	$(SERVING)/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/serving/packages.txt
	$(SERVING)/bin/pip install --quiet --disable-pip-version-check --no-deps vllm==$(VLLM) -e .
	touch $@

clean:
	rm -rf $(VENV) $(SERVING) out site

.PHONY: accuracy
accuracy: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/accuracy/schemes.py --write

.PHONY: peers
peers:
	OMP_NUM_THREADS=1 $(PYTHON) benchmarks/accuracy/peers.py --write benchmarks/results/peers.json

# every causal class of transformers at a tiny size, about a quarter of an hour
.PHONY: families
families: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt timm  # some towers
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/accuracy/families.py --write
