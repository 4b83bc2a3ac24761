# Every target sets up what it needs in .venv and build/, and touches nothing outside the tree (`verify`, as root, installs
# spin). What takes more than a few lines is a program beside its subject.

PYTHON ?= python3
# Empty: none is installed, and the tests that need it are skipped.
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -q --disable-pip-version-check
CMAKE := $(VENV)/bin/cmake
CONFIGURE := $(CMAKE) -S . -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(VENV)/bin/ninja" -B
NATIVE := CMakeLists.txt $(shell find native -path native/tests -prune -o -name '*.[ch]pp' -print)
# What was built knows the folder that it was built in. A checkout that was moved or copied since is set up anew.
MOVED := $(shell test ! -e $(VENV)/.made || test "$$(cat $(VENV)/.made)" = "$$(pwd -P)" || echo moved)
# The installed package knows the names of its modules: it is installed again when they change.
MODULES := $(shell find src -name '*.py' | LC_ALL=C sort | cksum)
RENAMED := $(shell test "$$(cat $(VENV)/.compiled 2>/dev/null)" = "$(MODULES)" || echo renamed)
TESTS := tests/own_shm.sh $(PY) -m pytest -q

# An interpreter that is interrupted while it starts prints a traceback: signals wait until the demo has its handlers.
HELD := $(shell env --block-signal=INT true 2>/dev/null && echo env --block-signal=INT,TERM,HUP,QUIT)
ENGINE := PYTHONPATH=examples $(HELD) $(PY) -m engine

.PHONY: moved renamed installed demo demo-hosts check check-tests test built root-test fresh engines-sources native-build native-test arm \
    musl hooks fuzz lint verify weak-memory sanitize soak bench gpu gpu-wheels figures bench-peers engines engine-table docs docs-links stub \
    sdist wheel wheels release-wheels pythons runner new-python clean

demo: installed
	@printf '1/3: '; $(ENGINE)
	@printf '2/3: '; $(ENGINE) --kill-worker
	@printf '3/3: '; $(ENGINE) --kill-worker --restart

# On two hosts, both on this machine, with a cable between them that is pulled. Needs root; about 20 seconds.
demo-hosts: installed
	$(ENGINE).hosts

# Packages are installed while memlane is compiled.
installed: $(VENV)/.made
	@$(MAKE) --no-print-directory -j2 $(VENV)/.installed

# After every change: a minute on two cores. Lint, and the tests that find most mistakes in little time, with fewer examples.
check: export MEMLANE_EXAMPLES := 4000
check: $(VENV)/.tools
	$(MAKE) --no-print-directory -j3 --output-sync=line check-tests test-sessions lint

check-tests: $(VENV)/.tools
	$(TESTS) -m 'unit or property' tests
# All tests. Everything is built before, with all cores, and nothing beside them.
test: built
	$(PY) -m tests.run

built: $(VENV)/.made
	@$(MAKE) --no-print-directory -j$$(($$(nproc) + 2)) $(VENV)/.tools engines-sources native-build hooks

# One folder of tests.
test-%: $(VENV)/.tools
	$(TESTS) tests/$*

test-base test-crash test-tiers: hooks
test-benchmarks test-fuzz test-offload: native-build
test-engines: engines-sources
# The setup of vLLM imports torch.
engines-sources: $(VENV)/.packages-test
	$(PY) -m tests.engines.sources
# What needs root: giving files away, becoming another user, and, on most machines, making hosts and cables.
root-test: $(VENV)/.tools
	$(PY) -m tests.run -m 'root or hosts'

# The README's commands in places that users have: before every release; a quarter of an hour.
fresh: $(VENV)/.tools
	$(TESTS) --durations=10 tests/fresh

# The C++ tests, the fuzz targets, and stand-ins for CUDA.
native-build: $(VENV)/.made
	@echo 'building the C++ tests'
	@$(CONFIGURE) build/native -DMEMLANE_NATIVE_TESTS=ON >/dev/null
	+@$(CMAKE) --build build/native -- --quiet

native-test: native-build
	$(PY) -m tests.run native
# The C++ tests on aarch64, in an emulator, and for the C libraries that wheels are built for.
arm musl: $(VENV)/.installed
	native/tests/elsewhere.sh $@

# The extension with sync hooks and the package around it, for tests that kill a process at a sync point.
hooks: $(VENV)/.made
	@echo 'building the extension with sync hooks'
	@$(CONFIGURE) build/hooks -DMEMLANE_SYNC_HOOKS=ON -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
	    -DPython_EXECUTABLE="$(CURDIR)/$(PY)" -Dnanobind_DIR="$$($(PY) -m nanobind --cmake_dir)" >/dev/null
	+@$(CMAKE) --build build/hooks -- --quiet
	@$(CMAKE) --install build/hooks --prefix build/hooks/site >/dev/null
	@find src/memlane -mindepth 1 -maxdepth 1 ! -name __pycache__ -exec ln -sfn ../../../../{} build/hooks/site/memlane/ \;

# Hostile bytes: what decodes them gets seeds, then changed ones for so many seconds per target, two targets at a time.
fuzz: $(VENV)/.tools native-build
	tests/own_shm.sh $(PY) -m tests.fuzz --seconds $(or $(FUZZ_SECONDS),600)

lint: $(VENV)/.tools
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy src tests/support tests/typing tests/run.py examples benchmarks verification release
	$(VENV)/bin/lint-imports
	$(VENV)/bin/lint-imports --config tests/house/protocol.importlinter

# The protocol as models: as the code has it they hold, with any one thing weakened they fail. About two minutes.
verify:
	@command -v spin || { test "$$(id -u)" = 0 && apt-get install -q -y spin; } || { echo 'apt-get install spin' >&2; exit 1; }
	$(PYTHON) -m verification.verify --output build/verification.txt
# The large scenarios of native/tests/weak_memory: about two minutes.
weak-memory: native-test
	build/native/native/tests/weak_memory full
# All tests again under AddressSanitizer with UndefinedBehaviourSanitizer, and under ThreadSanitizer: no report at all.
sanitize: $(VENV)/.tools native-build
	tests/sanitize.sh address
	tests/sanitize.sh thread
# The long runs: minutes to hours.
soak: built
	tests/soak.sh

# The figures of docs/benchmarks.md.
bench: bench-peers
	for one in foundation broadcast store offload.startup offload.moving remote awaiting watching exporting gathering latest \
	    tiers; do $(PY) -m benchmarks.$$one || exit; done

# Everything that needs a GPU, on a machine with one (DRY=1: on a stand-in); the wheels for one that has no network.
gpu: $(if $(DRY),$(VENV)/.tools native-build)
	PYTHON=$(if $(DRY),$(PY),$(PYTHON)) DRY=$(DRY) benchmarks/gpu/run.sh
gpu-wheels: $(VENV)/.installed
	PYTHON=$(PY) benchmarks/gpu/run.sh wheels

# The pictures of the README and the manual, measured anew: half an hour. `engine` needs what `make engines` sets up.
figures: bench-peers
	tests/own_shm.sh $(PY) -m benchmarks.figures
	for one in replaced stuck; do $(PY) -m benchmarks.figures.$$one || exit; done

# What the benchmarks compare with.
bench-peers: engines-sources native-test
	$(CMAKE) --build build/native --target enqueue_latency -- --quiet
	$(PIP) 'memlane[bench]'

# The engines that memlane is for: a real vLLM (860 MB to fetch, once, 3.5 GB on disk), SGLang's process groups and Ray, on
# their own classes and on memlane's. Half an hour; docs/howto has the tables.
engines: engines-sources
	$(PIP) 'ray>=2.9'
	for one in '' ' --release 0.33 --rounds 1' .sglang_groups .ray; do $(PY) -m benchmarks.engines$$one || exit; done
	$(PY) -m tests.engines.sources 0.11 0.25 0.26 0.27 0.28 0.29 0.30 0.31
	$(TESTS) tests/engines/test_vllm.py tests/engines/test_vllm_store.py tests/engines/test_vllm_region.py
	MEMLANE_STUCK_IN='0.11 0.32 0.33 0.5' $(TESTS) tests/engines/test_ray.py tests/engines/test_stuck_in_engines.py
	MEMLANE_REAL_TIERS=1 $(TESTS) tests/engines/test_real_vllm_tiers.py

# The releases of vLLM that run on memlane, each tried as a whole engine (130 MB more for each): docs/howto/vllm.md has it.
engine-table: engines-sources
	$(PY) -m benchmarks.engines.table

# The manual, in build/docs: its programs run, its tables are compared with the code, its links are checked, and every error
# text is found by its search. Two minutes. docs-links: links to other sites.
SPHINX := $(PY) -m sphinx -q -n -W --keep-going -d build/docs-pages
docs: $(VENV)/.docs
	$(TESTS) tests/docs
	$(SPHINX) -b html docs build/docs
	$(PY) -m tests.docs.built build/docs

docs-links: $(VENV)/.docs
	$(SPHINX) -b linkcheck docs build/docs-links
# Rewrites the native module's types.
stub: $(VENV)/.tools
	$(PY) -m nanobind.stubgen -q -m memlane._native -o src/memlane/_native.pyi
	$(VENV)/bin/ruff check -q --fix --ignore E501 src/memlane/_native.pyi
	$(VENV)/bin/ruff format -q src/memlane/_native.pyi

# Distributions, in dist/: the source, and a wheel for $(PYTHON) (wheels: for every CPython on this machine), installed and
# tested where nothing else is. release-wheels: all for this machine's architecture, by cibuildwheel; needs Docker.
sdist wheel wheels release-wheels: new-python
	$(PYTHON) -m release $(@:release-wheels=containers)

# All tests on CPython 3.12, 3.13 and 3.14, or on VERSIONS, in copies of the tree. Half an hour for each.
pythons: new-python
	$(PYTHON) -m release.pythons $(VERSIONS)

# Prepares a machine that is lent to CI, as root: PACKAGES, and user namespaces, in which tests run side by side.
runner:
	$(if $(PACKAGES),apt-get update -qq && apt-get install -qq -y $(PACKAGES))
	sysctl -q -e -w kernel.apparmor_restrict_unprivileged_userns=0
new-python:
	@$(PYTHON) release/old_python.py
# An environment that can build. `uv` makes one without pip.
$(VENV)/.made: $(MOVED)
	@$(if $(MOVED),rm -rf $(VENV) build)
	@$$(test -x $(PY) && echo $(PY) || echo $(PYTHON)) release/old_python.py
	@echo 'making $(VENV), with CMake and Ninja'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null
	@$(PIP) scikit-build-core nanobind cmake ninja
	@pwd -P >$@

$(VENV)/.compiled: $(VENV)/.made pyproject.toml $(NATIVE) $(RENAMED)
	@echo 'compiling memlane: about 40 s on two cores'
	@$(PIP) --no-build-isolation --no-deps -e .
	@echo "$(MODULES)" >$@

# What the extras demo, test and docs need.
$(VENV)/.packages-%: pyproject.toml | $(VENV)/.made
	@echo 'installing the packages of memlane[$*]'
	@$(if $(TORCH),$(if $(findstring test,$*),$(PIP) --no-compile $(TORCH)))
	@$(PY) release/requirements.py $* >$@.txt
	@$(PIP) --no-compile -r $@.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.packages-demo $(VENV)/.compiled
$(VENV)/.tools: $(VENV)/.packages-test $(VENV)/.compiled
$(VENV)/.docs: $(VENV)/.packages-docs $(VENV)/.compiled
$(VENV)/.installed $(VENV)/.tools $(VENV)/.docs:
	@touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
