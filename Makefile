# Every target makes the virtual environment it needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test slow torture hosts lint clean

train: .venv/runtime-installed
	$(BIN)/python train.py --config small.yaml

test: .venv/dev-installed
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

slow: .venv/dev-installed
	$(BIN)/python -m pytest -m slow -s

# Ends with the number of kills; about seven seconds a kill.
torture: .venv/dev-installed
	KILLS=100 $(BIN)/python -m pytest tests/test_torture.py -s

# Two hosts, made of network namespaces: needs root and iproute2.
hosts: .venv/dev-installed
	$(BIN)/python -m pytest tests/test_hosts.py -s

lint: .venv/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/runtime-installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/dev-installed: requirements-dev.txt requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@ .venv/runtime-installed

clean:
	rm -rf .venv cache .pytest_cache .ruff_cache .hypothesis
