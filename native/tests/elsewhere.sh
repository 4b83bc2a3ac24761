#!/usr/bin/env bash
# The C++ tests for other machines and C libraries, run on this machine, with .venv's CMake:
#
#   native/tests/elsewhere.sh arm   `make arm`: aarch64, in an emulator (Debian's g++-aarch64-linux-gnu and qemu-user)
#   native/tests/elsewhere.sh musl  `make musl`: the C libraries that wheels are built for, musl and the oldest glibc, 2.28
#
# In the emulator not those that need ThreadSanitizer, nor `orders`, which had not ended after five minutes, nor one step of
# `interleavings`. It orders memory as this machine does; what weaker machines may do, `make weak-memory` explores. zig, which
# PyPI has, compiles for both C libraries, and has no sanitizers; musl is linked in, and a newer glibc keeps old names.
set -euo pipefail
cd "$(dirname "$0")/../.."

run() { # the folder in build/, what ctest leaves out, CMake's options
    .venv/bin/cmake -S . -B "build/$1" -G Ninja -DMEMLANE_NATIVE_TESTS=ON "-DCMAKE_MAKE_PROGRAM=$PWD/.venv/bin/ninja" \
        "${@:3}" >/dev/null
    .venv/bin/cmake --build "build/$1"
    tests/own_shm.sh .venv/bin/ctest --test-dir "build/$1" --output-on-failure -E "$2"
}

case $1 in
arm)
    { command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; } >/dev/null || {
        echo 'make arm needs: apt-get install g++-aarch64-linux-gnu qemu-user' >&2
        exit 1
    }
    run arm '^orders$' -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ '-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu'
    ;;
musl)
    .venv/bin/python -m pip install -q --disable-pip-version-check 'memlane[musl]'
    for target in x86_64-linux-musl x86_64-linux-gnu.2.28; do
        run "zig-$target" '^$' -DMEMLANE_NO_INSTRUMENTATION=ON \
            "-DCMAKE_CXX_COMPILER=$PWD/.venv/bin/python;-m;ziglang;c++;-target;$target"
    done
    ;;
esac
