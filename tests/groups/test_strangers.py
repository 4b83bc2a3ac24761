"""Strangers at the port of a group's board, and members whose connections end without a word."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from memlane import GroupFailed, RankMissing
from memlane._base.deadline import Deadline
from memlane._net.tcp import Connection, Descriptors, Spare
from memlane.groups import TcpGroup, board
from tests.support import PATIENCE, Aside, Link, given_time, holdings, start, until
from tests.support.groups import SECRET, groups_of, on_ranks
from tests.support.queues import refuses
from tests.support.strangers import BEGUN, GREETING, PLAIN_GREETING

MANY = 1000
HUGE = 100 << 20
# Libzmq allocates what a frame announces before it comes: a handshake's command, and a message.
ANNOUNCED = [
    GREETING + b"\x06" + HUGE.to_bytes(8, "big") + b"\x05HELLO",
    GREETING + b"\x02" + HUGE.to_bytes(8, "big"),
]


def stranger(port: int, said: bytes = b"") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), PATIENCE)
    one.sendall(said)
    return one


def heard_until_its_end(one: socket.socket) -> bytes:
    """Raises TimeoutError if the other end keeps the connection."""
    said = b""
    with one, suppress(ConnectionError):
        while part := one.recv(4096):
            said += part
    return said


def board_of(group: TcpGroup) -> Any:
    return group._board


@pytest.mark.parametrize("said", ANNOUNCED, ids=["command", "message"])
def test_a_huge_frame_before_a_key_ends_the_connection(said: bytes) -> None:
    """Its announcement ends the connection.

    Fails without the guard: all of it was taken, because a member's values may be as large.
    """
    with groups_of("tcp", 2) as groups:
        heard_until_its_end(stranger(groups[0].port, said + bytes(1 << 16)))
        assert on_ranks(TcpGroup.broadcast_obj, groups, "said", 0) == ["said", "said"]


def many(link: Link, port: int, said: bytes) -> None:
    """Role: connections that stay, and say no more than that."""
    with ExitStack() as stack:
        for _ in range(MANY):
            stack.enter_context(stranger(port, said))
        link.tell("there")
        link.hear()


WORDS = {
    "nothing": b"",
    "half a greeting": BEGUN[0],
    "greeting": BEGUN[1],
    "half a frame": BEGUN[2],
}


@pytest.mark.parametrize("said", WORDS.values(), ids=WORDS)
def test_a_thousand_strangers_do_not_keep_ranks_out(said: bytes) -> None:
    """Few of them wait at the door at once; ranks get through meanwhile.

    Fails without the guard: every one took a descriptor, until its handshake had lasted too long.
    """
    with groups_of("tcp", 2) as groups:
        before = holdings("memlane-").descriptors.total()
        peer = start(many, groups[0].port, said)
        assert peer.hear(2 * PATIENCE) == "there"
        for number in range(5):
            assert (
                on_ranks(TcpGroup.broadcast_obj, groups, number, 1, timeout=PATIENCE)
                == [number] * 2
            )
        until(lambda: holdings("memlane-").descriptors.total() <= before + 150)
        peer.tell("leave")
        peer.result()
        kept = board_of(groups[0])._members.descriptors
        until(lambda: len(kept) == 3, "what listens and one connection of each rank stay")


def test_a_stranger_hides_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that connects and says nothing may be a rank that connects again, but not for long.

    Fails without the guard: the dead were listed once no stranger was at the door.
    """
    monkeypatch.setattr(board, "HANDSHAKE", 2 * PATIENCE)
    with groups_of("tcp", 2) as groups:
        assert on_ranks(TcpGroup.broadcast_obj, groups, "said", 0) == ["said", "said"]
        with stranger(groups[0].port):
            until(board_of(groups[0])._members.has_unidentified, "it is at the door")
            groups[1]._kept[0].abandon()
            with refuses(RankMissing, match="rank 1 of a group of 2 has died"):
                groups[0].broadcast_obj(None, 1, timeout=20.0)
            assert board_of(groups[0])._members.has_unidentified()


def test_half_a_frame_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger that does not finish a handshake in time is dropped."""
    monkeypatch.setattr(board, "HANDSHAKE", 0.3)
    with groups_of("tcp", 2) as groups:
        ones = [stranger(groups[0].port, said) for said in BEGUN]
        for one in ones:
            heard_until_its_end(one)
        assert on_ranks(TcpGroup.broadcast_obj, groups, "said", 0) == ["said", "said"]


@pytest.mark.parametrize("nbytes", [3999, 4000, 4001, 5_000_000])
def test_large_values_arrive_in_pieces(nbytes: int) -> None:
    """In pieces, both ways."""
    with groups_of("tcp", 3) as groups:
        for src in range(2):
            assert (
                on_ranks(TcpGroup.broadcast_obj, groups, bytes(nbytes), src) == [bytes(nbytes)] * 3
            )


@contextmanager
def one_that_listens(said: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Says that to each who comes, and keeps what they said until they left."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            one, _ = server.accept()
            with suppress(OSError):
                one.sendall(said)
            one.settimeout(PATIENCE)
            heard.append(heard_until_its_end(one))

        serving = Aside(serve)
        yield server.getsockname()[1], heard
        serving.result()


def test_a_stranger_in_the_place_of_rank_0_gets_no_frame_in() -> None:
    """A rank takes no frame from it that is huge, either."""

    def ends_it(seconds: float) -> None:
        with (
            one_that_listens(ANNOUNCED[0] + bytes(1 << 16)) as (port, heard),
            TcpGroup("127.0.0.1", port, 1, 2, secret=SECRET) as group,
        ):
            call = Aside(group.broadcast_obj, None, 0, timeout=seconds)
            until(lambda: heard, "the rank has ended the connection", seconds * 2 / 3)
            with refuses(RankMissing):
                call.result()

    given_time(ends_it, 3.0)


def member_store(group: TcpGroup, timeout: float = PATIENCE) -> board.BoardStore:
    store = board.BoardStore(group._context, group._addresses[0], group.port, group._keys, 1)
    store.deadline = Deadline(timeout)
    return store


def test_a_member_that_vanishes_leaves_nothing() -> None:
    """Rank 0 forgets whom it knew, and what they waited for.

    Fails without the guard: whoever left without a word stayed known for as long as the group.
    """
    with groups_of("tcp", 2) as groups:
        kept = board_of(groups[0])
        for _ in range(3):
            store = member_store(groups[1])
            assert store.add("k", 1)
            store._send("get", "never", None)
            until(lambda: kept._waiting, "rank 0 has heard that")
            store._connection.close(0)
            until(lambda: not kept._waiting and not kept._members.connections, "it is forgotten")


def test_many_calls_use_a_connection_each() -> None:
    """Each has a connection of its own, which may still be ending when the next one begins.

    Fails without the guard: addresses of monitors were used again too early.
    """
    with groups_of("tcp", 1) as (group,):
        for number in range(500):
            assert group.broadcast_obj(number, 0) == number


def test_a_half_sent_request_is_none() -> None:
    """A member may die between two pieces of a request."""
    with groups_of("tcp", 2) as groups:
        store = member_store(groups[1])
        assert store.add("k", 1) == 1
        for _ in range(20):
            store._connection.socket.send(bytes(4000), zmq.SNDMORE)
        store._connection.close(0)
        until(lambda: not board_of(groups[0])._members.connections, "rank 0 has seen its end")
        assert on_ranks(TcpGroup.broadcast_obj, groups, "said", 0) == ["said", "said"]


def inherited(_link: object) -> int:
    """Role: TCP sockets in a forked child."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), closing(socket.socket(fileno=os.dup(int(name)))) as one:
            is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
            count += is_tcp and one.type == socket.SOCK_STREAM
    return count


def test_forked_children_have_neither_port_nor_connections() -> None:
    """Neither of rank 0 nor of another rank that is in a call.

    Fails without the guard: a child kept the port of a group that had ended.
    """
    before = start(inherited).result()
    with groups_of("tcp", 2) as groups:
        assert start(inherited).result() == before
        waiting = Aside(groups[1].broadcast_obj, None, 0)
        until(lambda: board_of(groups[0])._waiting, "rank 1 waits at the board")
        assert start(inherited).result() == before
        groups[0].broadcast_obj("said", 0)
        assert waiting.result() == "said"


@pytest.mark.parametrize("answer", [b"\xc1", b"", b"\x92\xc0\x01", b"\x92\x01"])
def test_answers_of_another_version_are_blamed_on_rank_0(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of rank 0 that nobody understands is blamed on it."""
    with groups_of("tcp", 2) as groups:
        store = member_store(groups[1])
        monkeypatch.setattr(
            board.Board,
            "_send",
            lambda own, client, _number, _value: own._members.send(client, answer),
        )
        with refuses(GroupFailed, match="rank 0") as caught:
            store.add("k", 1)
        assert caught.value.rank == 0
        monkeypatch.undo()
        store.close()


FOREIGN = [
    b"\xc1",
    b"\x07",
    b"\x81\xa4over\x01",
    b"\x81\xa4over\x93\xa1x\x01\x02",
    b"\x92\x01\x02",
]


@pytest.mark.parametrize("value", FOREIGN)
@pytest.mark.parametrize("step", ["broadcast", "scatter", "gather", "left", "rest"])
def test_values_of_another_version_are_refused(step: str, value: bytes) -> None:
    """The rank that should have got them is told, in every kind of step."""
    if step == "left" and b"over" not in value:
        value = b"\xc1"
    with groups_of("tcp", 2) as groups:
        call = groups[1].collectives(Deadline(PATIENCE))
        key = f"{call._call}/1"
        places = {
            "broadcast": key,
            "scatter": f"{key}/1",
            "gather": f"{key}/all",
            "left": f"{call._call}/left",
            "rest": "memlane/rest/1",
        }
        call._store.set(places[step], value)
        if step == "rest":
            call._store.set(f"{key}/all", b"\x92\x81\xa5value\xc0\x81\xa5value\xc0")
        with refuses(GroupFailed) as caught:
            if step in ("gather", "rest"):
                call.gather(lambda: None)
            elif step == "scatter":
                call.scatter(0, list)
            else:
                call.broadcast(0, lambda: None)
        assert caught.value.rank == {"left": None, "rest": 1}.get(step, 0)
        call._store.end()


def test_delivered_bytes_that_are_none() -> None:
    """`broadcast_obj` raises for them."""
    for value in (b"\x81\xa5value\xc4\x01\xc1", b"\x81\xa5value\x07"):
        with groups_of("tcp", 2) as groups:
            store = member_store(groups[1])
            store.set("memlane/1/1", value)
            store.close()
            with refuses(GroupFailed, match="rank 0") as caught:
                groups[1].broadcast_obj(None, 0)
            assert caught.value.rank == 0


def test_rank_0_outlives_frames_of_all_kinds() -> None:
    """Rank 0 outlives each of them, also in values that other requests have put there."""
    frames = [b"\xc1", b"", b"\x94\x01\xa3add\xa1k\xa1x", b"\x94\x01\xa1\xff\xa1k\xc0"]
    frames += [os.urandom(n) for n in (1, 48, 4000)] + [b"\x91" * 3000, struct.pack("<Q", 1)]
    with groups_of("tcp", 2) as groups:
        store = member_store(groups[1])
        for frame in frames:
            store._connection.socket.send(frame)
            store._connection.socket.send_multipart([frame] * 3)
        for verb in ("get", "set", "add", "has", "delete", "forget", "what"):
            for argument in (None, 2**64 - 1, 1.5, "text", b"bytes", [], {}, [[[]]]):
                store._send(verb, "k", argument)
        assert on_ranks(TcpGroup.broadcast_obj, groups, "said", 0) == ["said", "said"]
        store._connection.close(0)


def test_a_keyless_member_of_zeromq_is_ignored() -> None:
    """With the right protocol and the wrong key, a thousand frames are nothing."""
    with groups_of("tcp", 2) as groups, zmq.Context() as context:
        public, secret = zmq.curve_keypair()
        with context.socket(zmq.DEALER) as one:
            one.linger = 0
            one.curve_serverkey = groups[1]._keys.board.public
            one.curve_publickey, one.curve_secretkey = public, secret
            one.connect(f"tcp://127.0.0.1:{groups[0].port}")
            with suppress(zmq.Again):  # once it was refused libzmq has nowhere to put them
                for _ in range(MANY):
                    one.send(bytes(4000), zmq.NOBLOCK)
            assert on_ranks(TcpGroup.broadcast_obj, groups, "said", 0) == ["said", "said"]
            assert not one.poll(100)
        assert len(z85.decode(public)) == 32
        assert len(board_of(groups[0])._members.connections) == 2  # the members


def test_plain_zeromq_gets_no_further_than_the_handshake() -> None:
    """Without any encryption nobody comes further than the greeting."""
    with groups_of("tcp", 2) as groups:
        said = heard_until_its_end(
            stranger(groups[0].port, PLAIN_GREETING + b"\x04\x26\x05READY" + bytes(32))
        )
        assert b"READY" not in said


def test_a_connection_whose_number_is_another_files() -> None:
    """libzmq closed it before it was asked for its number, which an eventfd has by now."""
    number = os.eventfd(0)
    before, spare = holdings("memlane-"), Spare()
    with pytest.raises(OSError, match="it was closed"):
        Connection(number, spare)
    descriptors = Descriptors(spare)
    descriptors.note(number)
    assert len(descriptors) == 0
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as others:
        with pytest.raises(OSError, match="it was closed"):
            Connection(ours.fileno(), spare)
        port = others.getsockname()[1]
        with pytest.raises(OSError, match="it was closed"):
            Connection(others.fileno(), spare, port + 1)
        Connection(others.fileno(), spare, port)
    connection = Connection(socket.socket().detach(), spare)
    os.dup2(number, connection.descriptor)
    assert not connection.is_open
    assert not connection.moved(0)
    os.close(connection.descriptor)
    spare.close()
    assert holdings("memlane-") == before
    os.close(number)


def test_a_fork_in_the_middle_of_a_look_hides_no_death() -> None:
    """Fails without the guard: the child keeps the connection open, and a dead peer looks alive."""
    spare = Spare()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inode = os.fstat(ours.fileno()).st_ino
        with spare.of(ours.fileno(), inode):
            child = start(lambda _link: files_open().count(f"socket:[{inode}]"))
        assert child.result() == 1  # which is `ours`
    spare.close()


def files_open() -> list[str]:
    folder, found = "/proc/self/fd", []
    for number in os.listdir(folder):
        with suppress(OSError):  # the folder itself
            found.append(os.readlink(f"{folder}/{number}"))
    return found
