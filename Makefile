PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow test-cluster lint bench check soak picture docs clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP) lint
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# Ray is large: its tests have an environment of their own, beside the one of `make test`.
CLUSTER := .venv-cluster
SERVER_TESTS := $(addprefix tests/server/test_,openai.py responses.py messages.py)

test-cluster: $(CLUSTER)/.installed
	$(CLUSTER)/bin/python -m pytest tests/cluster
	OVERLAP_SPEC_TEST_FLAGS="--replicas 2 --cpus-per-replica 0.5" \
		$(CLUSTER)/bin/python -m pytest $(SERVER_TESTS)

$(CLUSTER)/.installed: pyproject.toml
	test -x $(CLUSTER)/bin/python || $(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER)/bin/python -m pip install -q --disable-pip-version-check -e ".[dev,cluster]"
	touch $@

bench: $(STAMP)
	$(BIN)/python -m bench.all

check: $(STAMP)
	$(BIN)/python -m bench.check --ci

soak: $(STAMP)
	$(BIN)/python -m bench.serving_soak
	$(BIN)/python -m bench.attack --seconds 300

picture: $(STAMP)
	$(BIN)/python examples/picture.py

docs: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[docs]"
	$(BIN)/python -m mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p overlap_spec -p bench

$(STAMP): pyproject.toml
	@echo "installing into $(VENV): some minutes the first time, with nothing printed until it is done"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(CLUSTER) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
