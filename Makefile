PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Ray is large: the tests need it, the demo does not.
TESTED := $(VENV)/.installed-cluster

.PHONY: demo test test-busy test-slow test-cluster lint bench check soak picture docs clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# In the order of their names: files with few tests are the longest, and would be left to the end.
test: $(TESTED) lint
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

# What a clock could change, beside six processes that compute and never wait.
test-busy: $(TESTED)
	$(BIN)/python -m tests.support.busy 6 $(BIN)/python -m pytest -m clock -n 2 \
		$$(grep -rl "pytest.mark.clock" tests --include="*.py")

test-slow: $(TESTED)
	$(BIN)/python -m pytest -m slow

test-cluster: $(TESTED)
	$(BIN)/python -m pytest tests/cluster

bench: $(STAMP)
	$(BIN)/python -m bench.all

check: $(STAMP)
	$(BIN)/python -m bench.check --ci

soak: $(STAMP)
	$(BIN)/python -m bench.soak
	$(BIN)/python -m bench.attack --seconds 300
	$(BIN)/python -m bench.attack --disconnects 300 --minutes 2

picture: $(STAMP)
	$(BIN)/python examples/picture.py

docs: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[docs]"
	$(BIN)/python -m mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p overlap_spec -p bench -p examples.embedded_model -m tests.support.typed_arguments

$(STAMP): pyproject.toml
	@echo "installing into $(VENV): some minutes the first time, with nothing printed until it is done"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	touch $@

$(TESTED): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev,cluster]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
