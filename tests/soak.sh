#!/usr/bin/env bash
# The long runs (`make soak`): what `make test` does in short, with the variables that make it long. Minutes to hours.
set -euo pipefail
cd "$(dirname "$0")/.."
soak() { .venv/bin/python -m pytest -q --durations=10 "$@"; }

build/native/native/tests/ring_threads 100000000 8 16
MEMLANE_SOAK_KILLS=10000 MEMLANE_SOAK_STOPS=2000 MEMLANE_SOAK_PUTS=100000 soak \
    tests/broadcast/test_soak_kills.py tests/broadcast/test_soak_stops.py tests/store/test_soak_puts.py \
    tests/broadcast/test_large_kills.py
MEMLANE_SOAK_REMOTE=20000 MEMLANE_SOAK_CABLES=100 MEMLANE_SOAK_STRANGERS=1000 soak \
    tests/network/test_soak.py tests/network/test_cable.py tests/network/test_strangers.py \
    tests/network/test_ends.py
MEMLANE_SOAK_NAMES=2000 MEMLANE_SOAK_NAME_RACES=1000 soak tests/doors/test_kills.py
MEMLANE_SOAK_REPLACED=60 MEMLANE_SOAK_LATEST=60 soak tests/broadcast/test_replaced_readers.py tests/broadcast/test_latest_kills.py
MEMLANE_SOAK_WORKERS=100000 soak tests/workers/test_oracle.py
MEMLANE_SOAK_TORTURE=1200 soak tests/crash/test_torture.py
MEMLANE_SOAK_PASSAGES=2 soak tests/crash/test_every_point.py
MEMLANE_SOAK_INTERRUPTS=300 soak tests/broadcast/test_signals.py
MEMLANE_SOAK_CANCELS=10000 soak tests/broadcast/test_awaiting.py tests/network/test_awaiting.py
MEMLANE_EXAMPLES=1000000 soak tests/sessions
MEMLANE_EXAMPLES=50000 soak \
    tests/broadcast/test_small_shm.py tests/tiers/test_policies.py tests/tiers/test_block_pool_model.py
MEMLANE_SOAK_BENCH=5 soak tests/cli/test_command_line.py
MEMLANE_SOAK_MUTATED=170 soak tests/cli/test_mutated_segments.py
MEMLANE_SOAK_ATTACK=60 soak tests/network/test_costs.py
MEMLANE_SOAK_PARTITIONS=100 MEMLANE_SOAK_CUTS=3000 soak \
    tests/network/test_partitions.py tests/network/test_cuts.py
MEMLANE_SOAK_TIER_KILLS=500 MEMLANE_SOAK_SLOTS=1000000 soak -s tests/tiers/test_disk_tier_kills.py
MEMLANE_SOAK_TIER_TORTURE=600 soak -s tests/tiers/test_torture.py
MEMLANE_SOAK_RACES=100 MEMLANE_SOAK_REGIONS=400 MEMLANE_SOAK_CALLS=1 soak \
    tests/offload/test_races.py tests/offload/test_kills.py tests/offload/test_every_call.py \
    tests/base/test_failing_calls.py tests/base/test_refused_system_calls.py
MEMLANE_SOAK_SECONDS=180 MEMLANE_SOAK_STEPS=100000 MEMLANE_SOAK_LARGE=1 soak \
    tests/store/test_soak_readers.py tests/store/test_stopped.py tests/store/test_large.py \
    tests/store/test_ring_property.py tests/store/test_store_is_a_dict.py
