#!/bin/sh
# Runs a command with a /dev/shm of its own, so that two halves of the tests do not see each other's segments:
#
#   tests/own_shm.sh COMMAND ...
#
# Where a process may not mount one (it takes root), the halves run one after the other instead.
if unshare -m mount -t tmpfs tmpfs /dev/shm 2>/dev/null; then
    exec unshare -m sh -c 'mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec "$@"' sh "$@"
fi
exec flock build "$@"
