#!/usr/bin/env bash
# `make gpu`: everything that needs a GPU, on a machine with one (made for an H100 or H200). First the tests, then the
# measurements, in less than eight minutes and without a network; gpu.json and gpu.md are written to GPU_OUTPUT. The packages
# are those of PYTHON, torch among them; what it lacks beside them is taken from build/wheels, where `run.sh wheels` puts it
# on a machine with a network. DRY=1: all of it on a stand-in, in small, where there is no GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
output=${GPU_OUTPUT:-build/gpu}
needs=('msgspec>=0.18' 'pyzmq>=26')
python=build/gpu/venv/bin/python

if [ "${1:-}" = wheels ]; then # for CPython 3.12 on x86-64; then the size of what to bring there, with the tree
    "$PYTHON" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux_2_{28,27,26,24,17}_x86_64 --platform manylinux2014_x86_64 -d build/wheels "${needs[@]}"
    { git ls-files -z; find build/wheels -type f -print0; } | du -ch --files0-from=- | tail -1
    exit
fi

"$PYTHON" - <<'END'
import os, sys
try:
    import torch
except ImportError:
    sys.exit('make gpu: %s has no torch; name another: make gpu PYTHON=...' % sys.executable)
if not os.environ['DRY'] and not torch.cuda.is_available():
    sys.exit('make gpu: torch finds no GPU here; make gpu DRY=1 runs all of it on a stand-in')
END
end=$(($(date +%s) + ${GPU_SECONDS:-440}))
mkdir -p build/gpu
"$PYTHON" -m venv --system-site-packages --without-pip --clear build/gpu/venv
# Where PYTHON itself is in a virtual environment, its packages are not the system's.
"$PYTHON" -c "import site; print(*site.getsitepackages(), sep='\n')" \
    >"$($python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/python.pth"
pip=("$python" -m pip install -q --disable-pip-version-check --no-index --no-deps)
"${pip[@]}" --find-links build/wheels "${needs[@]}" || {
    echo 'make gpu: run `make gpu-wheels` where there is a network, and bring build/wheels here' >&2
    exit 1
}
"${pip[@]}" --no-build-isolation .
rm -f build/gpu/tests.xml
status=0
tests/own_shm.sh timeout -k 5 200 $python -m pytest -q -p no:cacheprovider --durations=5 --junitxml=build/gpu/tests.xml \
    tests/gpu ${DRY:+tests/offload/test_gpu_scenes.py} || status=$?
tests/own_shm.sh timeout -k 5 $((end - $(date +%s) + 30)) $python -m benchmarks.gpu ${DRY:+--dry} --until $end \
    --tests build/gpu/tests.xml --output "$output" || status=$?
exit $status
