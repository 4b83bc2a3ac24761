#!/usr/bin/env bash
# All tests under sanitizers, C++ first, then the extension under the Python tests:
#
#   tests/sanitize.sh address   AddressSanitizer and UndefinedBehaviourSanitizer
#   tests/sanitize.sh thread    ThreadSanitizer
#
# What follows goes to pytest. Everything is built under build/sanitize-*, beside the editable install and not over it;
# needs gcc. Any report of any process fails, also of one that no test waits for: reports go to files.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1
shift
work=$PWD/build/sanitize-$kind
reports=$work/reports
rm -rf "$reports"
mkdir -p "$reports"

case $kind in
address)
    sanitizers=address,undefined,float-cast-overflow,float-divide-by-zero
    library=asan
    ;;
thread)
    sanitizers=thread
    library=tsan
    ;;
*)
    echo "address or thread, not $kind" >&2
    exit 2
    ;;
esac

# A huge allocation that was refused leaves a line, but is no fault: hostile messages ask for them.
show_reports() {
    if grep -hrv 'WARNING: [A-Za-z]*Sanitizer failed to allocate' "$reports" >&2; then exit 1; fi
}
trap show_reports EXIT

# C++: leaks count as faults, too. Signals of faults are the sanitizer's, whoever asks for them (pytest does).
.venv/bin/cmake -S . -B "$work/native" -G Ninja -DMEMLANE_NATIVE_TESTS=ON "-DMEMLANE_SANITIZE=$sanitizers" \
    "-DCMAKE_MAKE_PROGRAM=$PWD/.venv/bin/ninja" >/dev/null
.venv/bin/cmake --build "$work/native"
export ASAN_OPTIONS="log_path=$reports/asan:handle_segv=2:handle_sigbus=2:handle_sigill=2"
# Forks of a process with threads go on, as they do without the sanitizer.
export TSAN_OPTIONS="halt_on_error=1:die_after_fork=0:log_path=$reports/tsan"
.venv/bin/ctest --test-dir "$work/native" --output-on-failure
if [ "$kind" = thread ]; then
    "$work/native/native/tests/ring_threads" 1000000 8 16
fi

# The extension: a tree of its own, found by an interpreter of its own (what an editable install puts in place
# comes before PYTHONPATH), which sees everything else of .venv. Processes that tests start run the same interpreter.
.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --upgrade \
    --target "$work/tree" --config-settings "build-dir=$work/extension" --config-settings cmake.build-type=RelWithDebInfo \
    --config-settings "cmake.define.MEMLANE_SANITIZE=$sanitizers" .
test -x "$work/venv/bin/python" || .venv/bin/python -m venv --without-pip "$work/venv"
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
printf '%s\n' "$work/tree" "$(packages .venv)" >"$(packages "$work/venv")/sanitize.pth"

# The interpreter is not instrumented, so the runtime comes first; and with it libstdc++, whose exceptions it wraps.
preload=$(gcc -print-file-name=lib$library.so):$(gcc -print-file-name=libstdc++.so)
# detect_leaks=0: CPython keeps types, modules and interned objects to its end, and what a killed or forked child
# leaves is no leak. A huge allocation is a MemoryError, as without the sanitizer.
export ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0:allocator_may_return_null=1"
export TSAN_OPTIONS="$TSAN_OPTIONS:allocator_may_return_null=1"
# Every Python object has memory of its own, so that a byte too far in one is seen.
export PYTHONMALLOC=malloc
# tests/house reads the source, which is the same.
test $# -gt 0 || set -- tests/base tests/broadcast tests/network tests/groups tests/store tests/offload tests/examples
# ThreadSanitizer knows every lock of the interpreter, the GIL included. It does not see the atomics of other libraries, so
# their threads look like races, and in forked children it takes one thread of libzmq for another. Tests that use libzmq
# are left out. (Threads of the BLAS also look like left behind by the first test that computes after a fork.)
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
if [ "$kind" = thread ]; then
    set -- "$@" --ignore=tests/network --ignore=tests/groups
    for file in $(grep -rlE 'zmq|tests\.support\.(remote_queues|proxies|groups)|engine\.hosts' --include='test_*.py' tests); do
        set -- "$@" "--ignore=$file"
    done
    # Its caller writes to memory that is being read, on purpose.
    set -- "$@" --deselect=tests/offload/test_copy_blocks_threads.py::test_pairs_that_change_meanwhile_are_used_as_checked
fi
instrumented() { LD_PRELOAD=$preload "$work/venv/bin/python" "$@"; }
instrumented -c 'import memlane._native as n, sys; sys.exit(not n.__file__.startswith(sys.argv[1]))' "$work/tree"
instrumented -m pytest -q "$@"
