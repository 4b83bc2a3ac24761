"""Ranks that do not come, come late, or die in a collective call: the others name them in time."""

import logging
import os
import signal
import time
from functools import partial
from typing import Any

import pytest

from memlane import GroupFailed, MessageQueue, RankMissing, in_the_same_node_as
from memlane._base.deadline import Deadline
from memlane._net.addresses import Address
from memlane.broadcast import grouping
from memlane.groups import TcpGroup, stores, tcp
from memlane.groups import board as board_module
from memlane.groups.board import Board
from memlane.groups.keys import group_keys
from tests.support import PATIENCE, Aside, Link, assert_in_time, given_time, start, until
from tests.support.groups import (
    KINDS,
    SECRET,
    SMALL,
    errors_of,
    groups_of,
    member,
    on_ranks,
    queues_over,
)
from tests.support.queues import segments, sweep

create = MessageQueue.create_from_process_group
HERE = [Address("127.0.0.1", False)]
SHORT = 1.0
SOON = 2.0
"""Seconds in which a death is named: a slice of waiting, and the others' step."""
BOUND = 2.0
"""Seconds that an error may come behind the deadline: a slice of waiting, and all of its steps."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("absent", range(3))
def test_rank_that_does_not_come(kind: str, absent: int) -> None:
    """Everybody else raises within the deadline, and names it; nothing stays behind."""
    before = segments()

    def is_named(seconds: float) -> None:
        with groups_of(kind, 3) as groups:
            present = [group for rank, group in enumerate(groups) if rank != absent]
            begun = time.monotonic()
            errors = errors_of(create, present, *SMALL, timeout=seconds)
            assert time.monotonic() - begun >= seconds
            assert_in_time(seconds + BOUND, begun)
            if kind == "foreign":  # its broadcasts wait for ever; let the threads end
                groups[absent]._said.update({call: {"error": "over"} for call in range(20)})
                with groups[absent]._news:
                    groups[absent]._news.notify_all()
        if kind == "foreign":  # which can only broadcast, in a fixed order
            errors = [e for e in errors if f"rank {absent} of" in str(e)] or errors
        for error in errors:
            assert isinstance(error, RankMissing), repr(error)
            assert error.ranks == (absent,), str(error)
            assert f"waiting for rank {absent}" in str(error)
        assert segments() == before

    given_time(is_named, SHORT)


@pytest.mark.parametrize("kind", ["tcp", "torch"])
def test_several_that_do_not_come(kind: str) -> None:
    """All of them are named, by all who came."""

    def are_named(seconds: float) -> None:
        with groups_of(kind, 5) as groups:
            errors = errors_of(in_the_same_node_as, groups[:3:2], 0, timeout=seconds)
        for error in errors:
            assert error.ranks == (1, 3, 4)  # type: ignore[attr-defined]
            assert "ranks 1, 3 and 4 of a group of 5" in str(error)

    given_time(are_named, SHORT)


@pytest.mark.parametrize("kind", ["tcp", "torch"])
@pytest.mark.parametrize("late", [0, 2])
def test_rank_that_comes_too_late(kind: str, late: int) -> None:
    """It learns at once that the others are gone; when all call again, all is well."""

    def learns_it(seconds: float) -> None:
        with groups_of(kind, 3) as groups:
            present = [group for rank, group in enumerate(groups) if rank != late]
            errors_of(create, present, *SMALL, timeout=seconds)
            begun = time.monotonic()
            (error,) = errors_of(create, [groups[late]], *SMALL, timeout=PATIENCE)
            assert_in_time(BOUND, begun)
            assert isinstance(error, RankMissing)
            assert f"this is rank {late}, which was too late" in str(error)
            with queues_over(groups, 1) as queues:
                queues[1].enqueue("together")
                assert queues[late].dequeue(PATIENCE) == "together"

    given_time(learns_it, SHORT)


@pytest.mark.parametrize("kind", ["tcp", "torch"])
def test_error_reaches_who_waits(kind: str) -> None:
    """A rank that leaves a call by an error between its steps ends the others' waits, too."""

    def leave(group: Any) -> None:
        from memlane.groups import collectives_of

        with collectives_of(group, PATIENCE) as call:
            call.gather(lambda: 0)
            if call.rank == 1:
                raise KeyboardInterrupt
            call.gather(lambda: 1)

    with groups_of(kind, 3) as groups:
        begun = time.monotonic()
        errors = errors_of(leave, groups)
        assert_in_time(BOUND, begun)
        assert isinstance(errors[1], KeyboardInterrupt)
        for error in errors[0], errors[2]:
            assert isinstance(error, GroupFailed)
            assert error.rank == 1
            assert "KeyboardInterrupt" in str(error)


@pytest.mark.parametrize("kind", ["tcp", "torch"])
def test_log_names_who_is_awaited(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line when it is due, and it begins with the culprit.

    Fails without the guard: a line that was due waited for the next look around.
    """
    monkeypatch.setenv("MEMLANE_RINGBUFFER_WARNING_INTERVAL", "0.1")
    monkeypatch.setattr(stores, "SLICE", 2 * PATIENCE)
    with caplog.at_level(logging.WARNING, "memlane"), groups_of(kind, 3) as groups:
        calls = [Aside(in_the_same_node_as, group, 0, timeout=PATIENCE) for group in groups[:2]]
        due = "collective call; waiting for rank 2"
        until(lambda: any(due in line for line in caplog.messages), due)
        calls.append(Aside(in_the_same_node_as, groups[2], 0, timeout=PATIENCE))
        assert [call.result() for call in calls] == [[True] * 3] * 3


def call_when_told(link: Link, group: TcpGroup) -> None:
    link.tell()
    link.hear()
    with create(group, *SMALL, timeout=PATIENCE) as queue:
        link.tell(queue.dequeue(PATIENCE))


def test_a_process_killed_before_the_call_is_named(method: str) -> None:
    """Real ones; a rank that is killed before the call is named, without it a new group works."""
    before = segments()
    with TcpGroup("127.0.0.1", 0, 0, 3, secret=SECRET) as group:
        peers = [
            start(member, group.port, rank, 3, call_when_told, method=method) for rank in (1, 2)
        ]
        for peer in peers:
            peer.hear()
            peer.tell("go")
        with create(group, *SMALL, timeout=PATIENCE) as queue:
            assert segments() == before
            queue.enqueue("to processes")
            for peer in peers:
                assert peer.hear() == "to processes"
                peer.result()


def call_twice(link: Link, group: TcpGroup) -> None:
    in_the_same_node_as(group, timeout=PATIENCE)
    link.tell("was there")
    link.hear()
    began = time.monotonic()
    try:
        create(group, *SMALL, timeout=PATIENCE).close()
    except RankMissing as error:
        link.tell((error.ranks, str(error), began, time.monotonic()))


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_died_between_two_calls_is_named_at_once(victim: int) -> None:
    """By all others, on whatever step they are; those that come later see it, too."""
    with TcpGroup("127.0.0.1", 0, 0, 3, secret=SECRET) as group:
        peers = {rank: start(member, group.port, rank, 3, call_twice) for rank in (1, 2)}
        in_the_same_node_as(group, timeout=PATIENCE)
        for peer in peers.values():
            peer.hear()
        doomed = peers.pop(victim)
        doomed.kill()
        begun = time.monotonic()
        (other,) = peers.values()
        other.tell("go on")
        text = rf"rank {victim} of a group of 3 has died .pid {doomed.pid}"
        with pytest.raises(RankMissing, match=text) as caught:
            create(group, *SMALL, timeout=PATIENCE)
        assert_in_time(SOON, begun)
        assert caught.value.ranks == (victim,)
        ranks, said, began, ended = other.hear()
        assert ranks == (victim,)
        assert text.replace(".pid", "(pid") in said
        assert_in_time(SOON, began, ended)
        other.result()


def die_in(link: Link, group: TcpGroup, step: str) -> None:
    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    match step:
        case "the probe":
            grouping.ShmRingBuffer = die  # type: ignore[assignment, misc]
            in_the_same_node_as(group, group.rank, timeout=PATIENCE)
        case "a broadcast":
            tcp._packed = die  # type: ignore[assignment]
            group.broadcast_obj("never", group.rank)
        case "attaching":
            grouping.Handle.from_json = die  # type: ignore[assignment, method-assign]
            create(group, *SMALL, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("step", "call"),
    [
        ("the probe", lambda group: in_the_same_node_as(group, 2, timeout=PATIENCE)),
        ("a broadcast", lambda group: group.broadcast_obj(None, 2, timeout=PATIENCE)),
        ("attaching", lambda group: create(group, *SMALL, timeout=PATIENCE)),
    ],
    ids=["probe", "broadcast", "attaching"],
)
def test_a_rank_that_dies_in_a_call_is_named(step: str, call: Any) -> None:
    """By the end of its connection to rank 0, to all others, on whatever step they are."""
    with (
        TcpGroup("127.0.0.1", 0, 0, 3, secret=SECRET) as first,
        TcpGroup("127.0.0.1", first.port, 1, 3, secret=SECRET) as second,
    ):
        peer = start(member, first.port, 2, 3, partial(die_in, step=step))
        calls = [Aside(call, group) for group in (first, second)]
        assert peer.join() == -signal.SIGKILL
        died = time.monotonic()
        for waiting in calls:
            text = rf"rank 2 of a group of 3 has died .pid {peer.pid}.: its connection"
            with pytest.raises(RankMissing, match=text):
                waiting.result()
            assert_in_time(1.0, died, waiting.ended)


def die_with_probe(link: Link, group: TcpGroup) -> None:
    ring = grouping.ShmRingBuffer

    def make(*arguments: Any) -> Any:
        made = ring(*arguments)
        link.tell(made.shared_memory.name)
        os.kill(os.getpid(), signal.SIGKILL)
        return made

    grouping.ShmRingBuffer = make  # type: ignore[assignment, misc]
    in_the_same_node_as(group, 1, timeout=PATIENCE)


def test_source_is_killed_with_its_probe() -> None:
    """The others name it; what it leaves is swept by the next creation of any segment."""
    before = segments()
    with TcpGroup("127.0.0.1", 0, 0, 2, secret=SECRET) as group:
        peer = start(member, group.port, 1, 2, die_with_probe)
        waiting = Aside(in_the_same_node_as, group, 1, timeout=PATIENCE)
        probe = peer.hear()
        assert peer.join() == -signal.SIGKILL
        died = time.monotonic()
        assert segments() - before == {probe}
        with pytest.raises(RankMissing, match=rf"rank 1 of a group of 2 has died .pid {peer.pid}"):
            waiting.result()
        assert_in_time(SOON, died, waiting.ended)
        sweep()
        assert segments() == before


def test_rank_0_is_killed() -> None:
    """With it goes the board; the others say so, in time."""
    peer = start(hold_board)
    port = peer.hear()
    with TcpGroup("127.0.0.1", port, 1, 2, secret=SECRET) as group:
        waiting = Aside(in_the_same_node_as, group, 0, timeout=PATIENCE)
        assert peer.hear() == "rank 1 waits"
        killed = peer.kill()
        with pytest.raises(RankMissing, match=r"rank 0\b.* has died"):
            waiting.result()
        assert_in_time(SOON, killed, waiting.ended)


def gather_and_wait(link: Link, keys: Any, port: int) -> None:
    """Role: rank 0, which does not keep the board, and collects what the others have."""
    group = tcp.BoardGroup(0, 3, keys, HERE, port, None, 1)
    link.tell("attached")
    with group.collectives(Deadline(PATIENCE)) as call:
        call.gather(lambda: 0)


def test_a_dead_rank_that_collects_is_named_although_another_has_not_come() -> None:
    keys = group_keys(SECRET)
    board = Board(HERE, 0, keys, 3)
    peer = start(gather_and_wait, keys, board.port)
    group = tcp.BoardGroup(1, 3, keys, HERE, board.port, board, 1)
    assert peer.hear() == "attached"

    def gather() -> None:
        with group.collectives(Deadline(PATIENCE)) as call:
            call.gather(lambda: 1)

    waiting = Aside(gather).until_blocked()
    killed = peer.kill()
    with pytest.raises(RankMissing, match=rf"rank 0 of a group of 3 has died .pid {peer.pid}"):
        waiting.result()
    assert_in_time(SOON, killed, waiting.ended)
    group.close()


def test_rank_0_is_stopped() -> None:
    """It is waited for as long as the call may last, and no longer."""
    peer = start(keep_board)
    port = peer.hear()
    with TcpGroup("127.0.0.1", port, 1, 2, secret=SECRET) as group:
        group.broadcast_obj("before", 1)
        peer.stop()
        begun = time.monotonic()
        with pytest.raises(RankMissing, match="waiting for rank 0, which keeps the group's board"):
            group.broadcast_obj("never", 1, timeout=SHORT)
        assert time.monotonic() - begun >= SHORT
        assert_in_time(SHORT + BOUND, begun)
        saying = Aside(group.broadcast_obj, "after", 1, timeout=PATIENCE).until_blocked()
        time.sleep(2 * SHORT)  # a wait for what must not happen
        peer.resume()
        assert saying.result() == "after"
        peer.tell("end")
        peer.result()


def keep_board(link: Link) -> None:
    with TcpGroup("127.0.0.1", 0, 0, 2, secret=SECRET) as group:
        link.tell(group.port)
        link.hear()


def hold_board(link: Link) -> None:
    with TcpGroup("127.0.0.1", 0, 0, 2, secret=SECRET) as group:
        link.tell(group.port)
        board = group._board
        until(lambda: board._waiting, "rank 1 waits at the board", PATIENCE / 4)
        link.tell("rank 1 waits")
        link.hear()


def test_nothing_runs_between_calls() -> None:
    """A group of somebody else leaves no thread when its broadcasts return in time."""
    with groups_of("foreign", 2) as groups:
        for _ in range(2):
            on_ranks(in_the_same_node_as, groups, 0, timeout=PATIENCE)


def call_as_another(link: Link, group: TcpGroup) -> None:
    link.tell()
    link.tell(group.broadcast_obj("another's", group.rank, timeout=PATIENCE))
    link.hear()


def attend(link: Link, group: TcpGroup) -> None:
    group.broadcast_obj("begins", group.rank)
    link.tell()
    in_the_same_node_as(group, timeout=PATIENCE)


def test_a_rank_that_is_started_again_was_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its connection ended a moment ago: those who wait for it are told, and the next call
    has the new process. Fails without the guard: they waited in a call that it never made."""
    monkeypatch.setattr(board_module, "_RECONNECTION", PATIENCE)
    with TcpGroup("127.0.0.1", 0, 0, 2, secret=SECRET) as group:
        first = start(member, group.port, 1, 2, attend)
        assert group.broadcast_obj(None, 1, timeout=PATIENCE) == "begins"
        first.hear()
        waiting = Aside(in_the_same_node_as, group, 0, timeout=PATIENCE)
        keeper = group._board
        until(lambda: keeper._values.get("memlane/calls/1") == 2, "rank 1 is in the call")
        first.kill()
        again = start(member, group.port, 1, 2, call_as_another)
        again.hear()
        text = rf"rank 1 of a group of 2 has died .pid {first.pid}"
        with pytest.raises(RankMissing, match=text):
            waiting.result()
        assert group.broadcast_obj(None, 1, timeout=PATIENCE) == "another's"
        again.hear()
        again.tell()
        again.result()


def keep_again(link: Link, port: int) -> None:
    with TcpGroup("127.0.0.1", port, 0, 2, secret=SECRET) as group:
        link.tell(group.port)
        link.tell(group.broadcast_obj(None, 1, timeout=PATIENCE))
        link.tell(group.broadcast_obj(None, 1, timeout=PATIENCE))


def test_rank_0_that_is_started_again_was_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who wait for it are told, and call again: both count their calls from there on."""
    monkeypatch.setattr(board_module, "_RECONNECTION", PATIENCE)
    first = start(keep_again, 0)
    port = first.hear()
    with TcpGroup("127.0.0.1", port, 1, 2, secret=SECRET) as group:
        group.broadcast_obj("first", 1)
        assert first.hear() == "first"
        waiting = Aside(group.broadcast_obj, None, 0, timeout=PATIENCE).until_blocked()
        first.kill()
        again = start(keep_again, port)
        again.hear()
        with pytest.raises(RankMissing, match=r"rank 0, which kept .* another process has taken"):
            waiting.result()
        for said in "second", "third":
            group.broadcast_obj(said, 1)
            assert again.hear() == said
        again.result()
