# make demo: set up, and sample the embedded model by plain MAR and by `speculative`. make test: set up, check the style, run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test bench clean

demo: $(VENV)/ready
	$(BIN)/cspd compare --methods ar,speculative --labels 0-9 --num 20 --num-iter 64 --cfg 3 --max-batch 1 --out samples --overwrite

test: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal  # two cores, one test each

bench: $(VENV)/ready
	$(BIN)/cspd bench --num-iter 64,16 --cfg 1,3 --batch 1,8
	$(BIN)/cspd bench --vq --batch 1,8

$(VENV)/ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) samples
