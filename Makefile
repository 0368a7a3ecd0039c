# make demo: set up, sample a digit, compare `speculative` with baseline sampling, and sample emojis from classes and from
#   prompts; two minutes after the installation, into samples/.
# make test: set up, check style and types, run the tests but the slow ones; a few minutes on two cores. The ten slowest
#   are printed.
# make test-all: the same with the slow tests, which sample the trained models at length or draw 200,000 sequences.
# make fast: the tests of `make test` alone.
# make package: build both packages into dist/, and run them from an empty environment.
# make docs: build the site from docs/ into site/; a warning is an error.
# make bench: time the methods on the digits' models.
# make lock: write the newest versions that fit into constraints.txt, with torch as below.
# make clean: remove the environment and what `make demo` made.
# Versions are those of constraints.txt; after `make clean` the newest with CONSTRAINTS=, the oldest with
#   CONSTRAINTS=oldest.txt.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
TORCH := torch==2.14.1 torchvision==0.29.1
VENV := .venv
BIN := $(VENV)/bin
COMPILE := $(BIN)/uv pip compile --extra test --extra docs --python-version 3.10 --upgrade --no-annotate --quiet

.PHONY: demo check test fast test-all package docs bench lock clean

demo: $(VENV)/ready
	$(BIN)/cspd sample --labels 3 --out samples/three --overwrite
	$(BIN)/cspd compare --methods ar,speculative --labels 0-9 --num 10 --num-iter 64 --cfg 3 --max-batch 1 --out samples/compared --overwrite
	$(BIN)/cspd sample --checkpoint emoji64 --method calibrated --labels 0-9 --num 10 --max-batch 10 --out samples/emoji --overwrite
	$(BIN)/cspd sample --checkpoint emoji64_text --prompts checkpoints/emoji64_text/prompts.json --num 8 --out samples/text --overwrite
	@echo "look at samples/three/grid.png, samples/compared/report.html, samples/emoji/grid.png and samples/text/grid.png"

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check fast

# two processes of one thread each, that share the work evenly: a fixture made twice costs less than one that waits
fast: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations=10 -m "not slow"

test-all: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# cspd and cspd-models as a user gets them: built, installed into an empty environment, and run outside the clone
package:
	rm -rf dist build
	$(PYTHON) -m venv dist/tools
	dist/tools/bin/pip install --quiet build
	dist/tools/bin/python -m build --outdir dist .
	dist/tools/bin/python -m build --outdir dist checkpoints
	ls -l dist/*.whl dist/*.tar.gz
	$(PYTHON) -m venv dist/empty
	dist/empty/bin/pip install --quiet $(CONSTRAINTS:%=--constraint %) dist/*.whl
	cd dist && empty/bin/cspd env
	cd dist && empty/bin/cspd sample --labels 3 --num-iter 4 --out three
	cd dist && empty/bin/cspd sample --checkpoint emoji64 --labels faces --num-iter 4 --method calibrated --out faces

docs: $(VENV)/ready
	$(BIN)/pip install --quiet $(CONSTRAINTS:%=--constraint %) --editable '.[docs]'
	$(BIN)/python scripts/results.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(VENV)/ready
	$(BIN)/cspd bench --num-iter 64,16 --cfg 1,3 --batch 1,8
	$(BIN)/cspd bench --vq --batch 1,8

lock: $(BIN)/uv
	printf '%s\n' $(TORCH) | $(COMPILE) setup.cfg - --universal --custom-compile-command 'make lock' --output-file constraints.txt

oldest.txt: setup.cfg $(BIN)/uv
	$(COMPILE) setup.cfg --resolution lowest-direct --output-file $@

$(VENV)/ready: setup.cfg pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(CONSTRAINTS:%=--constraint %) --editable '.[test]'
	touch $@

$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv

clean:
	rm -rf $(VENV) samples site dist build oldest.txt
