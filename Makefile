# Every target sets up what it needs in .venv and build/; nothing outside the tree is touched, but that `verify`, if root
# runs it, installs spin.

PYTHON ?= python3
# Empty: none is installed, and the tests that need it are skipped.
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
NATIVE := CMakeLists.txt $(shell find native -name '*.hpp' -o -name '*.cpp' -o -name 'CMakeLists.txt')
PIP := $(PY) -m pip install -q --disable-pip-version-check
# What was built knows the folder that it was built in. A checkout that was moved or copied since is set up anew.
MOVED := $(shell test ! -e $(VENV)/.installed || test "$$(cat $(VENV)/.installed)" = "$$(pwd -P)" || echo moved)
# So does the installed package the names of its modules: it is installed again when they change.
MODULES := $(shell find src -name '*.py' | LC_ALL=C sort | cksum)
RENAMED := $(shell test "$$(cat $(VENV)/.modules 2>/dev/null)" = "$(MODULES)" || echo renamed)

# An interpreter that is interrupted while it starts prints a traceback: signals wait until the demo has its handlers.
HELD := $(shell env --block-signal=INT true 2>/dev/null && echo env --block-signal=INT,TERM,HUP,QUIT)
ENGINE := PYTHONPATH=examples $(HELD) $(PY) -m engine

FUZZ_SECONDS ?= 600

.PHONY: moved renamed demo demo-hosts check test arm root-test fresh engines-sources native-build native-test hooks fuzz fuzz-build fuzz-test python-test verify weak-memory lint sanitize soak bench gpu gpu-wheels figures bench-peers engines docs docs-links stub clean

demo: $(VENV)/.installed
	$(ENGINE)
	$(ENGINE) --kill-worker
	$(ENGINE) --kill-worker --restart

# The demo on two hosts, both on this machine, with a cable between them that is pulled. Needs root; about 20 seconds.
demo-hosts: $(VENV)/.installed
	$(ENGINE).hosts

# After every change: a minute on two cores. Lint, and the tests that find most mistakes in little time; `make test` runs all of
# them, with more examples.
check: export MEMLANE_EXAMPLES := 4000
check: $(VENV)/.tools
	$(MAKE) --no-print-directory -j2 --output-sync=line check-tests test-sessions lint

check-tests: $(VENV)/.tools
	tests/own_shm.sh $(PY) -m pytest -q -m 'unit or property' tests

# On two cores four at once, as many tests wait; the longest first.
test: $(VENV)/.tools
	$(MAKE) --no-print-directory -j4 --output-sync=line test-broadcast test-network-first test-network-rest test-base test-store test-tiers test-crash test-engines test-examples test-sessions \
	    native-test test-offload test-cli test-groups fuzz-test test-inspect test-benchmarks test-house test-docs

# One folder of tests, with a /dev/shm of its own.
test-%: $(VENV)/.tools
	tests/own_shm.sh $(PY) -m pytest -q tests/$*

# Those with sockets take the longest, so they are two.
NETWORK := $(wildcard tests/network/test_[a-q]*.py)

test-network-first: $(VENV)/.tools hooks
	tests/own_shm.sh $(PY) -m pytest -q $(NETWORK)

test-network-rest: $(VENV)/.tools hooks
	tests/own_shm.sh $(PY) -m pytest -q tests/network $(NETWORK:%=--ignore=%)

test-base test-broadcast test-crash test-groups test-offload test-store test-tiers: hooks

test-engines: engines-sources

# own_shm.sh may leave no network.
engines-sources: $(VENV)/.tools
	$(PY) -m tests.engines.sources

# What needs root: giving files away, becoming another user, and, on most machines, making hosts and cables.
root-test: $(VENV)/.tools
	tests/own_shm.sh $(PY) -m pytest -q -m 'root or hosts' tests

# The README's commands in places that strangers have: before every release; a quarter of an hour.
fresh: $(VENV)/.tools
	tests/own_shm.sh $(PY) -m pytest -q --durations=10 tests/fresh

native-build: $(VENV)/.installed
	$(VENV)/bin/cmake -S . -B build/native -G Ninja -DMEMLANE_NATIVE_TESTS=ON \
	    -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(VENV)/bin/ninja" >/dev/null
	+$(VENV)/bin/cmake --build build/native

native-test: native-build
	tests/own_shm.sh $(VENV)/bin/ctest --test-dir build/native --output-on-failure

# The C++ tests on aarch64, in an emulator: Debian's g++-aarch64-linux-gnu and qemu-user. Not those that need
# ThreadSanitizer, nor `orders`, which had not ended after five minutes, nor one step of `interleavings`. The
# emulator orders memory as this machine does; what weaker machines may do, `make weak-memory` explores.
arm: $(VENV)/.installed
	@{ command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; } >/dev/null || \
	    { echo 'make arm needs: apt-get install g++-aarch64-linux-gnu qemu-user' >&2; exit 1; }
	$(VENV)/bin/cmake -S . -B build/arm -G Ninja -DMEMLANE_NATIVE_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux \
	    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	    -DCMAKE_CROSSCOMPILING_EMULATOR='qemu-aarch64;-L;/usr/aarch64-linux-gnu' \
	    -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(VENV)/bin/ninja" >/dev/null
	+$(VENV)/bin/cmake --build build/arm
	tests/own_shm.sh $(VENV)/bin/ctest --test-dir build/arm --output-on-failure -E '^orders$$'

# The C++ tests for the C libraries that wheels are built for: musl, and the oldest glibc, 2.28. zig, which PyPI has,
# compiles for both and has no sanitizers. All run on this machine: musl is linked in, and a newer glibc keeps old names.
musl: zig-x86_64-linux-musl zig-x86_64-linux-gnu.2.28

zig-%: $(VENV)/.installed
	$(PIP) --no-build-isolation -e '.[musl]'
	$(VENV)/bin/cmake -S . -B build/zig-$* -G Ninja -DMEMLANE_NATIVE_TESTS=ON -DMEMLANE_NO_INSTRUMENTATION=ON \
	    "-DCMAKE_CXX_COMPILER=$(CURDIR)/$(PY);-m;ziglang;c++;-target;$*" \
	    -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(VENV)/bin/ninja" >/dev/null
	+$(VENV)/bin/cmake --build build/zig-$*
	tests/own_shm.sh $(VENV)/bin/ctest --test-dir build/zig-$* --output-on-failure

# The extension with sync hooks and the package around it, for tests that kill a process at a sync point.
hooks: | $(VENV)/.installed
	$(VENV)/bin/cmake -S . -B build/hooks -G Ninja -DMEMLANE_SYNC_HOOKS=ON -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
	    -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(VENV)/bin/ninja" -DPython_EXECUTABLE="$(CURDIR)/$(PY)" \
	    -Dnanobind_DIR="$$($(PY) -m nanobind --cmake_dir)" >/dev/null
	+$(VENV)/bin/cmake --build build/hooks
	$(VENV)/bin/cmake --install build/hooks --prefix build/hooks/site >/dev/null
	find src/memlane -mindepth 1 -maxdepth 1 ! -name __pycache__ \
	    -exec ln -sfn ../../../../{} build/hooks/site/memlane/ \;

python-test: $(VENV)/.tools hooks
	$(PY) -m pytest -q

# Hostile bytes: what decodes them gets seeds, then changed ones for so many seconds per target, two targets at a time.
fuzz: fuzz-build
	tests/own_shm.sh $(PY) -m tests.fuzz --seconds $(FUZZ_SECONDS)

fuzz-build: $(VENV)/.tools native-build
	+$(VENV)/bin/cmake --build build/native --target fuzz

fuzz-test: FUZZ_SECONDS := 5
fuzz-test: fuzz

lint: $(VENV)/.tools
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy src tests/support tests/typing examples benchmarks verification release
	$(VENV)/bin/lint-imports
	$(VENV)/bin/lint-imports --config tests/house/protocol.importlinter

# The protocol as models: as the code has it they hold, with any one thing weakened they fail. About two minutes.
verify:
	@command -v spin >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get install -q -y spin; } || \
	    { echo 'make verify needs spin: apt-get install spin (as root)' >&2; exit 1; }
	$(PYTHON) -m verification.verify --output build/verification.txt

# The large scenarios of native/tests/weak_memory: about two minutes.
weak-memory: native-test
	build/native/native/tests/weak_memory full

# All tests again under AddressSanitizer with UndefinedBehaviourSanitizer, and under ThreadSanitizer: no report at all.
sanitize: $(VENV)/.tools
	tests/sanitize.sh address
	tests/sanitize.sh thread

# The long runs: minutes to hours, not part of `make test`.
soak: $(VENV)/.tools native-test
	build/native/native/tests/ring_threads 100000000 8 16
	MEMLANE_SOAK_KILLS=10000 MEMLANE_SOAK_STOPS=2000 MEMLANE_SOAK_PUTS=100000 $(PY) -m pytest -q --durations=10 \
	    tests/broadcast/test_soak_kills.py tests/broadcast/test_soak_stops.py tests/store/test_soak_puts.py \
	    tests/broadcast/test_large_kills.py
	MEMLANE_SOAK_REMOTE=20000 MEMLANE_SOAK_CABLES=100 MEMLANE_SOAK_STRANGERS=1000 $(PY) -m pytest -q --durations=10 \
	    tests/network/test_soak.py tests/network/test_cable.py tests/network/test_strangers.py \
	    tests/network/test_ends.py
	MEMLANE_SOAK_REPLACED=60 MEMLANE_SOAK_LATEST=60 MEMLANE_SOAK_GATHER=60 $(PY) -m pytest -q --durations=10 tests/broadcast/test_replaced_readers.py \
	    tests/broadcast/test_latest_kills.py tests/broadcast/test_gather_kills.py
	MEMLANE_SOAK_INTERRUPTS=300 $(PY) -m pytest -q tests/broadcast/test_signals.py
	MEMLANE_SOAK_CANCELS=10000 $(PY) -m pytest -q --durations=10 tests/broadcast/test_awaiting.py tests/network/test_awaiting.py
	MEMLANE_EXAMPLES=1000000 $(PY) -m pytest -q tests/sessions
	MEMLANE_EXAMPLES=50000 $(PY) -m pytest -q --durations=10 \
	    tests/broadcast/test_small_shm.py tests/tiers/test_policies.py tests/tiers/test_block_pool_model.py
	MEMLANE_SOAK_BENCH=5 $(PY) -m pytest -q tests/cli/test_command_line.py
	MEMLANE_SOAK_ATTACK=60 $(PY) -m pytest -q --durations=10 tests/network/test_costs.py
	MEMLANE_SOAK_PARTITIONS=100 MEMLANE_SOAK_CUTS=3000 $(PY) -m pytest -q --durations=10 \
	    tests/network/test_partitions.py tests/network/test_cuts.py
	MEMLANE_SOAK_TIER_KILLS=500 MEMLANE_SOAK_SLOTS=1000000 $(PY) -m pytest -q -s tests/tiers/test_disk_tier_kills.py
	MEMLANE_SOAK_RACES=100 MEMLANE_SOAK_REGIONS=400 MEMLANE_SOAK_CALLS=1 $(PY) -m pytest -q --durations=10 \
	    tests/offload/test_races.py tests/offload/test_kills.py tests/offload/test_every_call.py \
	    tests/base/test_failing_calls.py
	MEMLANE_SOAK_SECONDS=180 MEMLANE_SOAK_STEPS=100000 MEMLANE_SOAK_LARGE=1 $(PY) -m pytest -q --durations=10 \
	    tests/store/test_soak_readers.py tests/store/test_stopped.py tests/store/test_large.py \
	    tests/store/test_ring_property.py tests/store/test_store_is_a_dict.py

# The figures of docs/benchmarks.md, with the machine they were measured on.
bench: bench-peers
	$(PY) -m benchmarks.foundation
	$(PY) -m benchmarks.broadcast
	$(PY) -m benchmarks.store
	$(PY) -m benchmarks.offload.startup
	$(PY) -m benchmarks.offload.moving
	$(PY) -m benchmarks.remote
	$(PY) -m benchmarks.awaiting
	$(PY) -m benchmarks.watching
	$(PY) -m benchmarks.exporting
	$(PY) -m benchmarks.gathering
	$(PY) -m benchmarks.latest
	$(PY) -m benchmarks.tiers

# Everything that needs a GPU, on a machine with one (made for an H100 or H200): first the tests, then the measurements, in less
# than eight minutes and without a network; gpu.json and gpu.md are written to GPU_OUTPUT. Its packages are those of PYTHON, torch among
# them; what it lacks beside them is taken from build/wheels. DRY=1: all of it on a stand-in, in small, where there is no GPU.
DRY ?=
GPU_PYTHON := $(if $(DRY),$(PY),$(PYTHON))
GPU_PY := build/gpu/venv/bin/python
GPU_PIP := $(GPU_PY) -m pip install -q --disable-pip-version-check --no-index --no-deps
GPU_SECONDS ?= 440
GPU_OUTPUT ?= build/gpu
GPU_NEEDS := 'msgspec>=0.18' 'pyzmq>=26'

gpu: $(if $(filter $(PY),$(GPU_PYTHON)),$(VENV)/.tools)
	@DRY=$(DRY) $(GPU_PYTHON) -c "$$REFUSE_NO_GPU"
	@mkdir -p build/gpu && echo $$(($$(date +%s) + $(GPU_SECONDS))) >build/gpu/until
	$(GPU_PYTHON) -m venv --system-site-packages --without-pip --clear build/gpu/venv
	@# Where PYTHON itself is in a virtual environment, its packages are not the system's.
	@$(GPU_PYTHON) -c "import site; print(*site.getsitepackages(), sep='\n')" \
	    >"$$($(GPU_PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))")/python.pth"
	@$(GPU_PIP) --find-links build/wheels $(GPU_NEEDS) || \
	    { echo 'make gpu: run `make gpu-wheels` where there is a network, and bring build/wheels here' >&2; exit 1; }
	$(GPU_PIP) --no-build-isolation .
	@rm -f build/gpu/tests.xml
	status=0; tests/own_shm.sh timeout -k 5 200 $(GPU_PY) -m pytest -q -p no:cacheprovider --durations=5 \
	    --junitxml=build/gpu/tests.xml tests/gpu $(if $(DRY),tests/offload/test_gpu_scenes.py) || status=$$?; \
	end=$$(cat build/gpu/until); tests/own_shm.sh timeout -k 5 $$((end - $$(date +%s) + 30)) \
	    $(GPU_PY) -m benchmarks.gpu $(if $(DRY),--dry) --until $$end \
	    --tests build/gpu/tests.xml --output $(GPU_OUTPUT) || status=$$?; exit $$status

# The wheels that `make gpu` may need, for CPython 3.12 on x86-64; then the size of what to bring there, with the tree.
gpu-wheels: $(VENV)/.installed
	$(PY) -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
	    $(patsubst %,--platform manylinux_%_x86_64,2_28 2_27 2_26 2_24 2_17) --platform manylinux2014_x86_64 \
	    -d build/wheels $(GPU_NEEDS)
	@{ git ls-files -z; find build/wheels -type f -print0; } | du -ch --files0-from=- | tail -1

define REFUSE_NO_GPU
import os, sys
try:
    import torch
except ImportError:
    sys.exit('make gpu: %s has no torch; name another: make gpu PYTHON=...' % sys.executable)
if not os.environ['DRY'] and not torch.cuda.is_available():
    sys.exit('make gpu: torch finds no GPU here; make gpu DRY=1 runs all of it on a stand-in')
endef
export REFUSE_NO_GPU

# The pictures of the README and the manual, measured anew: half an hour. `engine` needs what `make engines` sets up.
figures: bench-peers
	tests/own_shm.sh $(PY) -m benchmarks.figures
	$(PY) -m benchmarks.figures.demo
	$(PY) -m benchmarks.figures.stuck

# What the benchmarks compare with.
bench-peers: engines-sources native-test
	$(PIP) --no-build-isolation -e '.[bench]'

# The engines that memlane is for, on their own classes and on memlane's: a real vLLM (860 MB to fetch, once, 3.5 GB on disk),
# SGLang's process groups and Ray. Half an hour; docs/howto has their tables.
engines: engines-sources
	$(PIP) 'ray>=2.9'
	$(PY) -m benchmarks.engines
	$(PY) -m benchmarks.engines --release 0.33 --rounds 1
	$(PY) -m benchmarks.engines.sglang_groups
	$(PY) -m benchmarks.engines.ray
	$(PY) -m tests.engines.sources 0.11
	MEMLANE_STUCK_IN='0.11 0.32 0.33 0.5' tests/own_shm.sh $(PY) -m pytest -q tests/engines/test_ray.py tests/engines/test_stuck_in_engines.py
	MEMLANE_REAL_TIERS=1 tests/own_shm.sh $(PY) -m pytest -q tests/engines/test_real_vllm_tiers.py

# The manual, in build/docs: its programs run, its tables are compared with the code, its own links are checked, and every error
# text is found by its search. Two minutes from a fresh checkout.
docs: $(VENV)/.docs
	tests/own_shm.sh $(PY) -m pytest -q tests/docs
	$(SPHINX) -b html docs build/docs
	$(PY) -m tests.docs.built build/docs

# Links to other sites: for CI, which can reach them.
docs-links: $(VENV)/.docs
	$(SPHINX) -b linkcheck docs build/docs-links

SPHINX := $(PY) -m sphinx -q -n -W --keep-going -d build/docs-pages

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) --no-build-isolation -e '.[docs]'
	touch $@

# Rewrites the type stub of the native module.
stub: $(VENV)/.tools
	$(PY) -m nanobind.stubgen -q -m memlane._native -o src/memlane/_native.pyi
	$(VENV)/bin/ruff check -q --fix --ignore E501 src/memlane/_native.pyi
	$(VENV)/bin/ruff format -q src/memlane/_native.pyi

.PHONY: musl sdist wheel wheels release-wheels pythons runner new-python

# The source distribution and a wheel for $(PYTHON), into dist/. The wheel is installed and tested where nothing else is,
# and read by mypy and pyright. At most five minutes from nothing.
wheel: new-python
	$(PYTHON) -m release wheel

# A wheel for every CPython on this machine, each tested in the same way.
wheels: new-python
	$(PYTHON) -m release wheels

sdist: new-python
	$(PYTHON) -m release sdist

# All tests on CPython 3.12, 3.13 and 3.14, or on those that VERSIONS names, in copies of the tree; one that is not on this machine is
# taken from Debian sid, which needs root and debootstrap. Half an hour for each.
VERSIONS ?=
pythons: new-python
	$(PYTHON) -m release.pythons $(VERSIONS)

# Every wheel of a release for this machine's architecture, by cibuildwheel; needs Docker.
release-wheels: new-python
	$(PYTHON) -m release containers

# Prepares a machine that is lent to CI: the packages that a target needs, and user namespaces, with which the tests
# run side by side and which Ubuntu forbids. As root.
PACKAGES ?=
USERNS := kernel/apparmor_restrict_unprivileged_userns
runner:
	$(if $(PACKAGES),apt-get update -qq && apt-get install -qq -y $(PACKAGES))
	test ! -e /proc/sys/$(USERNS) || sysctl -q -w $(subst /,.,$(USERNS))=0

new-python:
	@$(PYTHON) -c "$$REFUSE_OLD_PYTHON"

$(VENV)/.installed: pyproject.toml $(NATIVE) $(MOVED) $(RENAMED)
	$(if $(MOVED),rm -rf $(VENV) build)
	@test -x $(PY) || $(PYTHON) -c "$$REFUSE_OLD_PYTHON"
	test -x $(PY) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(PY) -c "$$REFUSE_OLD_PYTHON"
	$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null  # uv makes .venv without pip
	$(PIP) scikit-build-core nanobind cmake ninja
	$(PIP) --no-build-isolation -e '.[demo]'
	echo "$(MODULES)" >$(VENV)/.modules
	pwd -P >$@

define REFUSE_OLD_PYTHON
import sys
if sys.version_info < (3, 11):
    here = (sys.executable, sys.version.split()[0])
    sys.exit('memlane needs Python 3.11 or later; %s is %s. Name another (and remove .venv, if there is one): make PYTHON=python3.11 demo' % here)
endef
export REFUSE_OLD_PYTHON

$(VENV)/.tools: $(VENV)/.installed
	$(if $(TORCH),$(PIP) --no-compile $(TORCH))
	$(PIP) --no-build-isolation -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
