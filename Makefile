# Every target works in a fresh clone: .venv is made, and made again when the pinned requirements change.
PYTHON ?= python3
PY := .venv/bin/python
# Python compiles modules when it first imports them: most of torch's never are.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
LIMIT := 900
# What Python compiles stays in .venv, also where the environment says that it is not kept: each of the hundred processes
# of the tests would compile torch's modules again, for two seconds of its own.
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode
export PYTHONDONTWRITEBYTECODE :=
# Tiers of tests: tests/tiers.py says what belongs where.
FIRST := -m "not full and not slow"
REST := -m "full and not slow and not spare"
RANKS := 1 2 3 4 8
NCCL_FILES := $(addprefix tests/mpi/,$(addsuffix .py,movement/test_value movement/test_adjoints movement/test_dtypes functional/test_overlap))
PYTEST_MPI := -m pytest tests/mpi -p no:cacheprovider -q
# Tests without MPI, two at a time. A worker that has nothing left takes over some of the other's.
TWO := -n 2 --dist worksteal

.PHONY: demo test test-full test-all refreeze lint unit mpi torch nccl check soak mutation bench docs dist format clean
# One thing at a time: of all targets test-all alone may use more cores.
ifneq ($(MAKECMDGOALS),test-all)
.NOTPARALLEL:
endif

# ENGINE=torch: by process groups of torch.distributed, without MPI.
demo: .venv/ready
	$(PY) -m distdl demo $(if $(ENGINE),--engine $(ENGINE))

# Five minutes of two cores, after set-up.
test:
	$(MAKE) lint
	$(MAKE) unit MARKS='$(FIRST)'
	$(MAKE) mpi RANKS='1 2 4' MARKS='$(FIRST)'

# What `make test` leaves out, slow sweeps and spare cases apart: twenty minutes more.
test-full:
	$(MAKE) unit MARKS='$(REST)'
	$(MAKE) mpi MARKS='$(REST)'
	$(MAKE) nccl

# Slow sweeps too (one at a time: they print what they counted), whole models on 16 ranks, and more ranks than this
# machine has cores: hours of two cores. Where there are 32, `make -j 5 test-all WORKERS='-n 6'`: five launches side by
# side, and the tests without MPI on six more.
WORKERS :=
ALL := lint mpi-8 unit check-3 many mpi-4 mpi-3 check-2 mpi-2 nccl mpi-1 soak
test-all: $(ALL:%=all-%)

all-many: .venv/ready
	timeout -k 10 1800 $(PY) -m distdl run -n 16 -m pytest tests/mpi/nn/test_neon_many.py -p no:cacheprovider -q -m ""
	timeout -k 10 1800 $(PY) -m distdl run -n 20 $(PYTEST_MPI)
	timeout -k 10 600 $(PY) -m distdl run -n 20 -m pytest tests/mpi/movement/test_many_ranks.py -p no:cacheprovider -q -m ""

all-soak: .venv/ready
	timeout -k 10 1800 $(PY) -m distdl run -n 4 tests/soak.py 20000

all-%: .venv/ready
	$(MAKE) $* MARKS='-m ""' LIMIT=3000 TWO='$(WORKERS)'

# 200,000 mixed operations over 5,000 partitions on 4 ranks: hours where the ranks share two cores.
soak: .venv/ready
	$(PY) -m distdl run -n 4 tests/soak.py 200000 5000

# All mutants: forty minutes of one core.
mutation: .venv/ready
	$(PY) tests/mutation

# The same tests on ranks of torch.distributed; and its NCCL groups, played by gloo.
torch: .venv/ready
	timeout -k 10 $(LIMIT) $(PY) -m distdl run --engine torch -n 2 $(PYTEST_MPI) $(MARKS)
	timeout -k 10 $(LIMIT) $(PY) -m distdl run --engine torch -n 2 -m pytest $(NCCL_FILES) -p no:cacheprovider -q --engine=fake-nccl

# The engine for CUDA tensors, on a fake of NCCL, without and with one of peer memory.
PEER_FILES := tests/mpi/movement/test_value.py tests/mpi/movement/test_adjoints.py tests/mpi/movement/test_dtypes.py
nccl: .venv/ready
	timeout -k 10 $(LIMIT) $(PY) -m distdl run -n 3 -m pytest $(NCCL_FILES) -p no:cacheprovider -q --engine=fake-nccl
	timeout -k 10 $(LIMIT) $(PY) -m distdl run -n 3 -m pytest $(PEER_FILES) -p no:cacheprovider -q --engine=fake-peer

# The MPI suite again, with every movement checked.
check: check-2 check-3

check-%: .venv/ready
	DISTDL_CHECK=1 timeout -k 10 3000 $(PY) -m distdl run -n $* $(PYTEST_MPI)

# Names, error texts, messages and Python calls of today become the frozen ones; the difference is printed.
refreeze: .venv/ready
	rm -f tests/frozen/errors*.json
	DISTDL_REFREEZE=1 timeout -k 10 $(LIMIT) $(PY) -m pytest tests --ignore=tests/mpi -p no:cacheprovider -q
	DISTDL_REFREEZE=1 timeout -k 10 $(LIMIT) $(PY) -m distdl run -n 1 $(PYTEST_MPI)
	DISTDL_REFREEZE=1 timeout -k 10 $(LIMIT) $(PY) -m distdl run -n 2 $(PYTEST_MPI)
	git --no-pager diff -U0 tests/frozen

lint: .venv/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

unit: .venv/ready
	timeout -k 10 $(LIMIT) $(PY) -m pytest tests --ignore=tests/mpi -q $(TWO) $(MARKS)

mpi: $(RANKS:%=mpi-%)

# A world of one needs no launcher.
mpi-1: .venv/ready
	timeout -k 10 $(LIMIT) $(PY) $(PYTEST_MPI) $(TWO) $(MARKS)

mpi-%: .venv/ready
	timeout -k 10 $(LIMIT) $(PY) -m distdl run -n $* $(PYTEST_MPI) $(MARKS)

# In minutes; `python -m bench --full` has every size.
bench: .venv/ready
	$(PY) -m bench.bench_overhead
	$(PY) -m bench -n 2
	$(PY) -m bench -n 1,4 bench/bench_scaling.py
	$(PY) -m bench.report

docs: .venv/docs
	$(PY) -m pytest tests/test_docs.py -q
	.venv/bin/jupyter execute notebooks/*.ipynb
	$(PY) -m sphinx -q -W -c docs . site
	DISTDL_SITE=site $(PY) -m pytest tests/test_site.py -q

# Wheel and sdist of this version, in dist/, with what they say of themselves checked.
dist: .venv/dist
	rm -rf dist build *.egg-info
	$(PY) -m build
	$(PY) -m twine check --strict dist/*

format: .venv/ready
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/ready: requirements/dev.txt requirements/data.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) -r requirements/dev.txt
	$(PIP) --no-deps -r requirements/data.txt
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

.venv/docs: .venv/ready requirements/docs.txt
	$(PIP) -r requirements/docs.txt
	touch $@

.venv/dist: .venv/ready requirements/dist.txt
	$(PIP) -r requirements/dist.txt
	touch $@
