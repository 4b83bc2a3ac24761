#!/bin/sh
# Runs a command with a /dev/shm of its own, so that the parts of `make test` do not see each other's segments:
#
#   tests/own_shm.sh COMMAND ...
#
# Root mounts one in a mount namespace. Other users need a user namespace around it, in which they keep their own id:
# as its root (`unshare -rm`) the tests would take themselves for a user who can give files away and become somebody
# else, and could open files of any mode. Of the capabilities in there they keep those with which tests make hosts and
# cables (examples/lab), for which they also get a network of their own.
#
# Where the machine refuses that, as containers often do, the parts run one after the other instead.
try() {
    place=$1 script="$2 && exec $3\"\$@\""
    shift 3
    if $place sh -c "$script" sh true 2>/dev/null; then
        exec $place sh -c "$script" sh "$@"
    fi
}

shm='mount -t tmpfs -o mode=1777 tmpfs /dev/shm'
if [ "$(id -u)" = 0 ]; then
    try "unshare --mount" "$shm" "" "$@"
else
    own="unshare --user --map-current-user --keep-caps --mount"
    kept="setpriv --inh-caps=-all,+sys_admin,+sys_chroot,+net_admin --ambient-caps=-all,+sys_admin,+sys_chroot,+net_admin "
    try "$own --net" "$shm && ip link set lo up" "$kept" "$@"
    try "$own" "$shm" "$kept" "$@"  # without `ip`, for one
fi
exec flock build "$@"
