PYTHON ?= python3
# What Python and pytest compile is kept, whatever the machine says: to collect all tests takes half.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Ray is large: the tests of replicas need it.
TESTED := $(VENV)/.installed-cluster

.PHONY: demo test everyday test-ci test-busy test-cluster mutants lint bench check picture \
	docs clean
# In the order of their names: files with few tests are the longest, and would be left to the end.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	--durations=25 --durations-min=4

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Linters and types beside the tests.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j2 lint everyday

# Of each behaviour one quick proof.
everyday: $(STAMP)
	$(PYTEST) -m "not ci"

# What `make test` leaves out and .ci/run runs: matrices, long fuzz, servers of their own.
test-ci: $(TESTED)
	$(PYTEST) -m ci

# What a clock could change, beside six processes that compute and never wait.
test-busy: $(TESTED)
	$(BIN)/python -m tests.support.busy 6 $(BIN)/python -m pytest -m clock -n 2 \
		$$(grep -rl "pytest.mark.clock" tests --include="*.py")

test-cluster: $(TESTED)
	$(BIN)/python -m pytest tests/cluster

# Changes of the product that the everyday tests must notice.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

bench: $(STAMP)
	$(BIN)/python -m bench.all

check: $(STAMP)
	$(BIN)/python -m bench.check --ci

picture: $(STAMP)
	$(BIN)/python examples/picture.py

docs: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[docs]"
	$(BIN)/python -m mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p overlap_spec -p bench -p examples.embedded_model -m tests.support.typed_arguments

$(STAMP): EXTRAS := dev
$(TESTED): EXTRAS := dev,cluster
$(STAMP) $(TESTED): pyproject.toml
	@echo "installing into $(VENV): some minutes the first time, with nothing printed until it is done"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[$(EXTRAS)]"
	touch $(STAMP) $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
