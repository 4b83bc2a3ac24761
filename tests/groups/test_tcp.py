"""TcpGroup: memlane's own group, and what keeps others out of it."""

import errno
import os
import pickle
import socket
from threading import Event
from typing import Any

import pytest
import zmq

from memlane import (
    Closed,
    GroupFailed,
    InvalidArgument,
    MessageQueue,
    RankMissing,
    SystemFault,
    in_the_same_node_as,
)
from memlane._base.deadline import Deadline
from memlane._net.addresses import addresses_of
from memlane.groups import TcpGroup, board
from memlane.groups.board import BoardStore
from memlane.groups.keys import group_keys
from memlane.groups.stores import StoreCollectives
from tests.support import PATIENCE, Alarm, Aside, given_time, until
from tests.support.groups import SECRET, SMALL, groups_of, on_ranks, queues_over
from tests.support.missing import needs
from tests.support.queues import refuses

pytestmark = pytest.mark.wheel

DATA = {"text": "ü", "bytes": b"\0", "list": [1, None, 2.5, True]}


def test_broadcast_obj_carries_plain_data_from_any_rank() -> None:
    """Plain data from any rank, in order; tuples come back as lists."""
    with groups_of("tcp", 3) as groups:
        for src in range(3):
            given = [DATA if rank == src else None for rank in range(3)]
            calls = [Aside(g.broadcast_obj, obj, src) for g, obj in zip(groups, given, strict=True)]
            assert [call.result() for call in calls] == [DATA] * 3
        first, *others = on_ranks(TcpGroup.broadcast_obj, groups, (1, (2,)), 0)
        assert first == (1, (2,))
        assert others == [[1, [2]]] * 2


def test_what_is_no_plain_data() -> None:
    """Only types that need no code to be decoded are accepted."""
    with groups_of("tcp", 1) as (group,), refuses(TypeError):
        group.broadcast_obj(object(), 0)


def test_source_does_not_wait() -> None:
    """The other ranks may call later."""
    with groups_of("tcp", 2) as (first, second):
        first.broadcast_obj("early", 0)
        first.broadcast_obj("bird", 0)
        assert [second.broadcast_obj(None, 0) for _ in range(2)] == ["early", "bird"]


def test_source_that_does_not_come() -> None:
    def is_named(seconds: float) -> None:
        with (
            groups_of("tcp", 2) as (first, _),
            refuses(TimeoutError, match="waiting for rank 1") as caught,
        ):
            first.broadcast_obj(None, 1, timeout=seconds)
        assert isinstance(caught.value, RankMissing)
        assert (caught.value.ranks, caught.value.timeout) == ((1,), seconds)

    given_time(is_named, 0.2)


@pytest.mark.parametrize(
    "call",
    [in_the_same_node_as, lambda group: MessageQueue.create_from_process_group(group, *SMALL)],
    ids=["in_the_same_node_as", "create_from_process_group"],
)
def test_a_group_s_timeout_is_that_of_its_calls(call: Any) -> None:
    """Unless they have their own. Fails without the guard: they took 300 s, whatever it had."""

    def is_kept(seconds: float) -> None:
        with (
            TcpGroup("127.0.0.1", 0, 0, 2, secret=SECRET, timeout=seconds) as first,
            refuses(RankMissing, match=f"after {seconds} s waiting for rank 1") as caught,
        ):
            call(first)
        assert caught.value.timeout == seconds

    given_time(is_kept, 0.3)


def test_little_stays_on_the_board() -> None:
    """Calls do not pile up in rank 0's memory, however many there are; no handle stays.

    Fails without the guard: of each call its last list stayed.
    """
    with groups_of("tcp", 2) as groups:
        for _ in range(6):
            for queue in on_ranks(MessageQueue.create_from_process_group, groups, *SMALL):
                queue.close()
            for src in range(2):
                on_ranks(TcpGroup.broadcast_obj, groups, "said", src)
        kept = groups[0]._board._values
        assert len(kept) <= 2 + 3 + 2
        assert not any(b"buffer_handle" in value for value in kept.values() if type(value) is bytes)


def test_little_stays_of_calls_that_failed() -> None:
    """However often a rank gives up, and the others come too late.

    Fails without the guard: of each call it stayed who had left it.
    """

    def does_not_grow(seconds: float) -> None:
        with groups_of("tcp", 3) as groups:
            kept = groups[0]._board._values
            sizes = []
            for _ in range(6):
                for rank, timeout in ((1, seconds), (0, PATIENCE), (2, PATIENCE)):
                    with refuses(RankMissing):
                        groups[rank].broadcast_obj("said", 0, timeout=timeout)
                sizes.append(sum(len(repr(item)) for item in kept.items()))
            assert sizes[5] == sizes[1]
            assert on_ranks(TcpGroup.broadcast_obj, groups, "said", 0) == ["said"] * 3

    given_time(does_not_grow, 0.5)


@pytest.mark.parametrize("secret", ["another secret of the tests", b"\xff" * 16])
def test_a_peer_with_another_secret_is_refused(secret: str | bytes) -> None:
    """A peer with another secret gets no answer, and an error that says what may be wrong."""
    with groups_of("tcp", 2) as (first, second):

        def is_told(seconds: float) -> None:
            with (
                TcpGroup("127.0.0.1", first.port, 1, 2, secret=secret) as stranger,
                refuses(TimeoutError, match="its group has a different secret") as caught,
            ):
                stranger.broadcast_obj(None, 0, timeout=seconds)
            assert caught.value.ranks == (0,)  # type: ignore[attr-defined]

        given_time(is_told, 0.3)
        first.broadcast_obj("for members", 0)
        assert second.broadcast_obj(None, 0) == "for members"


def test_another_secret_seen_from_rank_0() -> None:
    """The error about the missing rank says that somebody came with another secret."""
    other = "another secret of the tests"

    def is_told(seconds: float) -> None:
        with (
            TcpGroup("127.0.0.1", 0, 0, 2, secret=SECRET) as first,
            TcpGroup("127.0.0.1", first.port, 1, 2, secret=other) as stranger,
        ):
            waits = Aside(stranger.broadcast_obj, None, 0, timeout=1.5 * seconds)
            with refuses(RankMissing, match="rank 1") as caught:
                first.broadcast_obj(None, 1, timeout=seconds)
            with refuses(RankMissing):
                waits.result()
            assert "refused, because their group has another secret" in str(caught.value)

    given_time(is_told, 1.0)


@pytest.mark.parametrize("secret", [os.fsdecode(b"\xff" * 16), "\ud800" * 16])
def test_a_secret_that_is_not_utf8(secret: str) -> None:
    """Bytes of an environment variable are one; other surrogates are refused."""
    if secret[0] == "\ud800":
        with refuses(InvalidArgument, match="pass bytes"):
            TcpGroup("127.0.0.1", 0, 0, 1, secret=secret)
        return
    with TcpGroup("127.0.0.1", 0, 0, 1, secret=secret) as group:
        assert group.broadcast_obj(1, 0) == 1
        assert group_keys(secret) == group_keys(os.fsencode(secret))


def test_a_host_that_is_not_utf8() -> None:
    with refuses(InvalidArgument, match="cannot be the name of a host"):
        TcpGroup("127.0.0.\udcff", 0, 0, 1, secret=SECRET)


def connect(context: Any, port: int, curve: str) -> Any:
    """A socket made by a stranger."""
    client = context.socket(zmq.DEALER)
    client.linger = 0
    keys = group_keys(SECRET)
    if curve != "none":
        client.curve_serverkey = keys.board.public
        client.curve_publickey, client.curve_secretkey = (
            keys.member if curve == "member" else zmq.curve_keypair()
        )
    client.connect(f"tcp://127.0.0.1:{port}")
    return client


class Bomb:
    went_off = False

    def __reduce__(self) -> Any:
        return setattr, (Bomb, "went_off", True)


@pytest.mark.parametrize("curve", ["none", "own key", "member"])
def test_nothing_is_ever_unpickled(curve: str) -> None:
    """A stranger is ignored, even with the board's key; a member's pickle is refused."""
    with groups_of("tcp", 2) as (first, second), zmq.Context() as context:
        with connect(context, first.port, curve) as client:
            for junk in pickle.dumps(Bomb()), b"", b"\xc1", b"\x94\x01\xa3set\xa1k\xa1v":
                client.send(junk)
            heard = bool(client.poll(1000 * PATIENCE if curve == "member" else 300))
            assert heard == (curve == "member")  # the last of those is a request
            first.broadcast_obj("goes on", 0)
            assert second.broadcast_obj(None, 0) == "goes on"
        assert ("k" in first._board._values) == (curve == "member")
    assert not Bomb.went_off


def test_a_plain_tcp_stranger_does_no_harm() -> None:
    """Bytes of no protocol, and connections that say nothing, do no harm."""
    with groups_of("tcp", 2) as (first, second):
        strangers = [socket.create_connection(("127.0.0.1", first.port)) for _ in range(8)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100_000))
        first.broadcast_obj(1, 0)
        assert second.broadcast_obj(None, 0) == 1
        for each in strangers:
            each.close()


@pytest.mark.parametrize("secret", ["", "short", b"fifteen bytes.."])
def test_a_short_secret_is_refused(secret: str | bytes) -> None:
    with refuses(ValueError, match="at least 16 bytes"):
        TcpGroup("127.0.0.1", 0, 0, 1, secret=secret)


@pytest.mark.parametrize(
    "arguments",
    [
        ("127.0.0.1", 0, 1, 1),
        ("127.0.0.1", 0, 1, 2),
        ("127.0.0.1", -1, 0, 1),
        ("127.0.0.1", 65536, 0, 1),
        ("127.0.0.1", 0, -1, 1),
        ("127.0.0.1", 0, 0, 0),
    ],
)
def test_numbers_that_do_not_fit(arguments: Any) -> None:
    with refuses(ValueError):
        TcpGroup(*arguments, secret=SECRET)


def test_port_that_is_taken() -> None:
    with groups_of("tcp", 1) as (group,), refuses(OSError, match="cannot listen") as caught:
        TcpGroup("127.0.0.1", group.port, 0, 1, secret=SECRET)
    assert isinstance(caught.value, SystemFault)
    assert caught.value.errno == errno.EADDRINUSE


def test_host_that_is_not_known() -> None:
    with refuses(OSError, match="cannot resolve"):
        TcpGroup("no.such.host.invalid", 1, 0, 1, secret=SECRET)


def test_rank_0_listens_on_the_given_address_only() -> None:
    """Rank 0 listens on the given address only, or not at all."""
    with refuses(OSError, match="cannot listen"):
        TcpGroup("192.0.2.1", 0, 0, 1, secret=SECRET)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names of hosts and what they mean."""
    known: dict[str, list[str]] = {}
    resolve = socket.getaddrinfo

    def resolved(host: Any, *arguments: Any, **named: Any) -> list[Any]:
        means = known.get(host, [host])
        return [one for each in means for one in resolve(each, *arguments, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return known


def test_a_name_with_several_addresses_is_found(names: dict[str, list[str]]) -> None:
    """Rank 0 listens on those of its host; the others find one, also before it listens.

    Fails without the guard: only the first address counted.
    """
    names["rank0.test"] = ["192.0.2.1", "127.0.0.2", "127.0.0.3"]
    names["seen-from-rank1.test"] = ["127.0.0.9", "127.0.0.3"]
    with (
        TcpGroup("rank0.test", 0, 0, 3, secret=SECRET) as first,
        TcpGroup("seen-from-rank1.test", first.port, 1, 3, secret=SECRET) as second,
        TcpGroup("rank0.test", first.port, 2, 3, secret=SECRET) as third,
    ):
        groups = [first, second, third]
        assert on_ranks(TcpGroup.broadcast_obj, groups, "said", 0) == ["said"] * 3
        assert [group._addresses[0].host for group in groups] == [
            "127.0.0.2",
            "127.0.0.3",
            "127.0.0.2",
        ]


def test_an_unreachable_address_is_passed_over(names: dict[str, list[str]]) -> None:
    """One that cannot be reached is passed over for one that refuses."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        port = taken.getsockname()[1]
    names["rank0.test"] = ["2001:db8::1", "127.0.0.2"]
    with TcpGroup("rank0.test", port, 1, 2, secret=SECRET) as second:
        waits = Aside(second.broadcast_obj, None, 0, timeout=PATIENCE)
        waits.until_blocked()
        with TcpGroup("127.0.0.2", port, 0, 2, secret=SECRET) as first:
            first.broadcast_obj("said", 0)
            assert waits.result() == "said"


def test_rank_0_whose_name_means_a_loopback_address(
    names: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """As Debian's /etc/hosts has it. Fails without the guard: nobody said why ranks elsewhere
    could not connect."""
    names["node7"] = ["127.0.1.1"]
    with TcpGroup("node7", 0, 0, 2, secret=SECRET):
        assert "rank 0 listens on 127.0.1.1, which is what 'node7' means" in caplog.text
    caplog.clear()
    for host, size in (("localhost", 2), ("127.0.0.1", 2), ("node7", 1)):
        TcpGroup(host, 0, 0, size, secret=SECRET).close()
    assert caplog.text == ""


def test_a_link_local_address_keeps_its_scope() -> None:
    """Fails without the guard: without it the kernel knows no way there."""
    (address,) = addresses_of("fe80::1%lo")
    assert address.at(5) == "tcp://[fe80::1%lo]:5"


def test_ipv6_addresses_work() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(needs("IPv6", str(error)))
    with (
        TcpGroup("::1", 0, 0, 2, secret=SECRET) as first,
        TcpGroup("::1", first.port, 1, 2, secret=SECRET) as second,
    ):
        first.broadcast_obj(6, 0)
        assert second.broadcast_obj(None, 0) == 6


def test_secret_is_not_shown() -> None:
    with groups_of("tcp", 1) as (group,):
        shown = repr(group) + repr(group._keys)
        keys = group_keys(SECRET)
        for secret in SECRET, keys.board.secret.decode(), keys.member.secret.decode():
            assert secret not in shown


def test_closed_objects_raise() -> None:
    with groups_of("tcp", 2) as groups:
        for group in groups:
            group.close()
            group.close()
            assert "closed" in repr(group)
            with refuses(Closed):
                group.broadcast_obj(None, 0)


def test_dropped() -> None:
    """Dropping the last reference ends thread and sockets (the fixture of all tests checks)."""
    TcpGroup("127.0.0.1", 0, 0, 1, secret=SECRET).broadcast_obj(1, 0)


def test_rank_0_closes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its close waits for ranks in the middle of a call, so that no call fails at its end."""
    monkeypatch.setattr(board, "_PARTING", PATIENCE)  # the other rank may have to wait for its turn
    with groups_of("tcp", 2) as (first, second):
        call = second.collectives(Deadline(PATIENCE))
        closing = Aside(first.close).until_blocked()
        assert call.broadcast(1, lambda: "the board still works") == "the board still works"
        call.__exit__(None, None, None)
        closing.result()


def test_rank_0_closes_under_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for something that can no longer come learn it at once."""
    monkeypatch.setattr(board, "_PARTING", 0.3)
    with groups_of("tcp", 2) as (first, second):
        waiting = Aside(second.broadcast_obj, None, 0, timeout=PATIENCE)
        until(lambda: first._board._waiting, "rank 1 waits at the board")
        first.close()
        with refuses(GroupFailed, match="rank 0 closed the group"):
            waiting.result()


def test_a_member_that_says_anything() -> None:
    """The board outlives it, and goes on for the others.

    Fails without the guard: the board's thread ended.
    """
    with groups_of("tcp", 2) as groups:
        group = groups[1]
        store = board.BoardStore(group._context, group._addresses[0], group.port, group._keys, 1)
        for frame in (b"\xc1", b"", b"\x94\x01\xa3add\xa1k\xa1x", b"\x94\x01\xa1\xff\xa1k\xc0"):
            store._connection.socket.send(frame)
        for who in (b"\x93\x00\x01\x02", b"\x92\xa1x\x01"):  # three numbers; a text for a rank
            store._connection.socket.send(b"\x94\x01\xa4join\xa0" + who)
        for _ in range(2):  # more than an integer of MessagePack
            store._send("add", "k", 2**63)
        store._connection.socket.send_multipart([b"more", b"parts"])
        assert on_ranks(TcpGroup.broadcast_obj, groups, "said", 0) == ["said", "said"]
        store._connection.close(0)


def test_what_no_rank_has_written() -> None:
    """The error says which rank should have written it."""
    with groups_of("tcp", 2) as groups:
        call = groups[1].collectives(Deadline(PATIENCE))
        call._store.set(f"{call._call}/1", b"\xc1")
        with refuses(GroupFailed, match="rank 0") as caught:
            call.broadcast(0, lambda: None)
        assert caught.value.rank == 0
        call.__exit__(None, None, None)


def test_rank_0_does_not_wait_for_the_dead() -> None:
    """Nor for a rank whose call was abandoned."""
    with groups_of("tcp", 2) as (first, second):
        second.collectives(Deadline(PATIENCE))._store._connection.close(0)
        first.close()


class _Unanswered(dict[str, bytes]):
    """A store in which all ranks have arrived, but one has not answered."""

    deadline, host = Deadline(0.0), None

    def add(self, key: str, number: int) -> int:
        return number

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def get(self, key: str, timeout: float = 0.0) -> bytes | None:  # type: ignore[override]
        return None

    def has(self, key: str) -> bool:
        return False

    def wake(self) -> None: ...
    def dead(self, _number: int) -> dict[int, int]:
        return {}


def test_who_has_come_but_not_answered_is_missing() -> None:
    """If all have arrived when the missing are determined, the one that owes an answer is named."""
    call = StoreCollectives(_Unanswered(), 1, 0, 2)  # type: ignore[arg-type]
    with pytest.raises(RankMissing, match="waiting for rank 1 of a group of 2"):
        call._take("1/1", 1)


def cut(descriptor: int) -> None:
    """Shuts a connection down. The board's own thread alone may change what it knows of it."""
    with socket.socket(fileno=os.dup(descriptor)) as it:
        it.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_comes_back_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank says again who it is. Fails without that: it was listed as dead."""
    monkeypatch.setattr(board, "_RECONNECTION", PATIENCE)
    with groups_of("tcp", 2) as groups:
        keeper = groups[0]._board
        waiting = Aside(groups[1].broadcast_obj, None, 0, timeout=PATIENCE)
        until(lambda: keeper._waiting and keeper._in_call, "rank 1 waits")
        ((route, connection),) = keeper._members.connections.items()
        cut(connection.descriptor)
        until(
            lambda: route not in keeper._in_call and keeper._in_call, "rank 1 is back", PATIENCE / 2
        )
        assert not keeper._lost
        assert groups[0].broadcast_obj("there", 0) == waiting.result() == "there"
        assert board._DEAD not in keeper._values


@pytest.mark.parametrize("verb", ["get", "set", "add"])
@pytest.mark.parametrize("lost", ["request", "answer"])
def test_what_is_lost_with_a_connection_is_repeated(
    monkeypatch: pytest.MonkeyPatch, lost: str, verb: str
) -> None:
    """The board does it once. Fails without that: the call waited for its whole timeout."""
    monkeypatch.setattr(board, "_RECONNECTION", PATIENCE)
    with groups_of("tcp", 2) as groups, groups[1].collectives(Deadline(PATIENCE)) as call:
        keeper, store, cuts = groups[0]._board, call._store, []
        store.set("key", b"before")
        take = keeper._take

        def losing(client: bytes, request: bytes) -> None:
            if board._decode_request(request)[1] == verb and not cuts:
                cuts.append(verb)
                cut(keeper._members.connections[client].descriptor)
                if lost == "request":
                    return
            take(client, request)

        monkeypatch.setattr(keeper, "_take", losing)
        if verb == "add":
            assert [store.add("number", 1) for _ in range(2)] == [1, 2]
        elif verb == "set":
            store.set("key", b"after")
            assert store.get("key", PATIENCE) == b"after"
        else:
            assert store.get("key", PATIENCE) == b"before"
        assert cuts
        store.delete("key")


def test_a_connection_that_comes_back_while_its_rank_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says who it is once it looks; until then it is not listed as dead."""

    def comes_back_within(seconds: float) -> None:
        monkeypatch.setattr(board, "_RECONNECTION", seconds)
        with groups_of("tcp", 2) as groups:
            keeper, computes, may_end = groups[0]._board, Event(), Event()

            def made() -> bytes:
                computes.set()
                assert may_end.wait(PATIENCE)
                return b"made"

            def write() -> object:
                with groups[1].collectives(Deadline(PATIENCE)) as call:
                    return call.broadcast(1, made)

            writing = Aside(write)
            assert computes.wait(PATIENCE)
            (connection,) = keeper._members.connections.values()
            cut(connection.descriptor)
            until(lambda: keeper._lost, "the connection is lost")
            first = keeper._lost.get(1, (0, None))[1]
            until(keeper._members.has_unidentified, "there is another one")
            until(lambda: keeper._lost.get(1, (0, None))[1] is not first, "its time is over")
            was_listed = board._DEAD in keeper._values
            may_end.set()
            assert not was_listed
            assert writing.result() == b"made"
            with groups[0].collectives(Deadline(PATIENCE)) as call:
                assert call.broadcast(1, lambda: b"") == b"made"

    given_time(comes_back_within, 0.8)


def test_calls_without_a_deadline_find_each_other() -> None:
    """One behind the other: the second looks for what the first has left.

    Fails without the guard: so long a poll is refused ("timeout is too large").
    """
    with groups_of("tcp", 2) as groups:
        for _ in range(3):
            with queues_over(groups, timeout=None) as queues:
                queues[0].enqueue("said", PATIENCE)
                assert queues[1].dequeue(PATIENCE) == "said"


def test_close_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be called again. Fails without the guard: the board listened for ever."""
    group = TcpGroup("127.0.0.1", 0, 0, 1, secret=SECRET)
    thread = group._board._thread

    def interrupted() -> None:
        monkeypatch.undo()
        raise Alarm

    monkeypatch.setattr(thread, "join", interrupted)
    with pytest.raises(Alarm):
        group.close()
    with refuses(Closed):
        group.broadcast_obj(1, 0)
    group.close()
    assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", group.port), PATIENCE)


def test_a_group_that_its_own_thread_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run anywhere: the board ends, and waits for nobody there."""
    first, second = (TcpGroup("127.0.0.1", 0, 0, 1, secret=SECRET) for _ in range(2))
    board_of_first = first._board
    take, kept = board_of_first._take, [first]

    def collect(*request: Any) -> None:
        kept.clear()
        take(*request)

    monkeypatch.setattr(board_of_first, "_take", collect)
    port = first.port
    store = BoardStore(second._context, first._addresses[0], port, first._keys, 0)
    store.deadline = Deadline(PATIENCE)
    del first
    try:
        store.add("key", 1)
    finally:
        store.close()
        second.close()
    until(lambda: not board_of_first._thread.is_alive())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), PATIENCE)
