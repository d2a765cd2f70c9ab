# Every target works in a fresh clone: .venv is made, and made again when the pinned requirements change.
PYTHON ?= python3
PY := .venv/bin/python
RANKS := 1 2 3 4 8
LIMIT := 900
PYTEST_MPI := -m pytest tests/mpi -p no:cacheprovider -q

.PHONY: demo test test-all lint unit mpi bench docs format clean
.NOTPARALLEL:

demo: .venv/ready
	$(PY) -m distdl demo

test: lint unit mpi

# Slow sweeps too, whole models on 16 ranks, and more ranks than this machine has cores.
test-all: .venv/ready
	$(MAKE) lint unit mpi MARKS='-m ""' LIMIT=3000
	timeout -k 10 1800 $(PY) -m distdl run -n 16 -m pytest tests/mpi/test_neon_many.py -p no:cacheprovider -q -m ""
	timeout -k 10 1800 $(PY) -m distdl run -n 20 $(PYTEST_MPI)

lint: .venv/ready
	$(PY) -m ruff check .
	$(PY) -m mypy

unit: .venv/ready
	timeout -k 10 $(LIMIT) $(PY) -m pytest tests --ignore=tests/mpi -q $(MARKS)

mpi: $(RANKS:%=mpi-%)

mpi-%: .venv/ready
	timeout -k 10 $(LIMIT) $(PY) -m distdl run -n $* $(PYTEST_MPI) $(MARKS)

bench: .venv/ready
	$(PY) -m bench.bench_overhead
	$(PY) -m distdl run -n 2 -m bench.bench_movement
	$(PY) -m distdl run -n 2 -m bench.bench_layers

docs: .venv/docs
	$(PY) -m pytest tests/test_docs.py -q
	.venv/bin/jupyter execute notebooks/*.ipynb
	$(PY) -m mkdocs build --strict --quiet

format: .venv/ready
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

clean:
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/ready: requirements/dev.txt requirements/data.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/data.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

.venv/docs: .venv/ready requirements/docs.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	touch $@
