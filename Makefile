# make demo: set up and sample the embedded model. make test: set up, check the style, run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test bench clean

demo: $(VENV)/ready
	$(BIN)/cspd sample --checkpoint digits32 --labels 0-9 --num 40 --num-iter 64 --cfg 3 --seed 0 --max-batch 20 --out samples

test: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest

bench: $(VENV)/ready
	$(BIN)/cspd bench --num-iter 64 --cfg 3 --batch 1,8 --queued 1000

$(VENV)/ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) samples
