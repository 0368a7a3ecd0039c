# make demo: set up, sample digits by plain MAR and by `speculative`, which are compared, and emojis: of classes by
#   `calibrated`, and of texts.
# make test: set up, check style and types, run the tests but the slow ones; a few minutes on two cores.
# make test-all: the same with the slow tests, which sample the trained models at length or draw 200,000 sequences.
# make bench: time the methods on the digits' models.
# make clean: remove the environment and what `make demo` made.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo check test test-all bench clean

demo: $(VENV)/ready
	$(BIN)/cspd compare --methods ar,speculative --labels 0-9 --num 20 --num-iter 64 --cfg 3 --max-batch 1 --out samples --overwrite
	$(BIN)/cspd sample --checkpoint emoji64 --method calibrated --labels 0-9 --num 20 --num-iter 64 --max-batch 20 --out samples_emoji --overwrite
	$(BIN)/cspd sample --checkpoint emoji64_text --prompts checkpoints/emoji64_text/prompts.json --num 20 --max-batch 20 --out samples_text --overwrite

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# two processes of one thread each, that share the work evenly: a fixture made twice costs less than one that waits
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

bench: $(VENV)/ready
	$(BIN)/cspd bench --num-iter 64,16 --cfg 1,3 --batch 1,8
	$(BIN)/cspd bench --vq --batch 1,8

$(VENV)/ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) samples samples_emoji samples_text
