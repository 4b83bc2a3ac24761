"""Handles of queues with remote readers: what they carry, what they hide, and what is refused."""

import dataclasses
import json
import logging
import pickle
from typing import Any

import pytest
import zmq

from memlane import AccessRefused, Handle, MessageQueue, RankTaken, WriterUnreachable
from memlane.broadcast.handle import FORMAT_VERSION
from memlane.groups import TcpGroup
from tests.support import PATIENCE, Link, start
from tests.support.groups import SECRET
from tests.support.queues import refuses, start_reader
from tests.support.remote_queues import HERE, LIVENESS, address_of, remote_queue, remote_writer


def keys_of(handle: Handle) -> set[str]:
    return set(handle.remote_reader_keys)


def test_the_handle_has_a_port_and_secrets() -> None:
    """A port chosen by the kernel, no ring, nothing local; always with secrets."""
    with remote_writer() as writer, remote_writer() as other:
        handle = writer.export_handle()
        host, port = address_of(handle)
        assert (host, handle.remote_addr_ipv6) == (HERE, False)
        assert port != address_of(other.handle)[1]
        assert (handle.buffer_handle, handle.local_subscribe_addr) == (None, None)
        assert handle.local_reader_ranks == []
        assert handle.remote_server_key
        assert keys_of(handle)
        assert writer.handle == handle
        assert keys_of(handle).isdisjoint(keys_of(other.export_handle()))


def test_ipv6_addresses_work() -> None:
    """The address is in brackets and marked; readers connect to it."""
    with remote_queue(connect_ip="::1") as (writer, (reader,)):
        handle = writer.handle
        assert handle.remote_addr_ipv6
        assert handle.remote_subscribe_addr is not None
        assert handle.remote_subscribe_addr.startswith("tcp://[::1]:")
        writer.enqueue("six")
        assert reader.dequeue(PATIENCE) == "six"
        assert str(writer.statistics().readers[0].address).startswith("[::1]:")


def test_the_default_address_works() -> None:
    """Without connect_ip it is an address of this host, and works."""
    with remote_queue(connect_ip=None) as (writer, (reader,)):
        assert address_of(writer.handle)[0] not in ("0.0.0.0", "::", "*")
        writer.enqueue(1)
        assert reader.dequeue(PATIENCE) == 1


def test_all_interfaces_only_if_asked_for() -> None:
    """A wildcard is no connect_ip; listen_on_all names one address and listens on all."""
    for wildcard in ("0.0.0.0", "::", "*", "", "no.such.host", "127.0.0.1:80", "224.0.0.1"):
        with refuses(ValueError):
            remote_writer(connect_ip=wildcard)
    with refuses(ValueError, match=r"192\.0\.2\.1"):
        remote_writer(connect_ip="192.0.2.1")
    with remote_queue(listen_on_all=True) as (writer, (reader,)):
        writer.enqueue(1)
        assert reader.dequeue(PATIENCE) == 1


def test_the_writers_own_handle() -> None:
    """Readers attach with `handle` as with `export_handle()`; changing one changes no other."""
    with remote_writer(2, 1) as writer:
        assert writer.handle == writer.export_handle()
        readers = [MessageQueue.create_from_handle(writer.handle, rank) for rank in (0, 1)]
        writer.enqueue("to both")
        assert [reader.dequeue(PATIENCE) for reader in readers] == ["to both"] * 2
        writer.export_handle().remote_reader_keys.clear()
        assert keys_of(writer.handle)
        for reader in readers:
            reader.close()


def test_a_handle_that_lost_its_keys() -> None:
    """The error says that, and nothing about options that the queue does not have."""
    with remote_writer() as writer:
        handle = writer.export_handle()
        handle.remote_server_key = ""
        with refuses(ValueError, match="no remote_server_key"):
            MessageQueue.create_from_handle(handle, 0)


def test_a_readers_handle_has_its_own_key_only() -> None:
    """With a rank one key, without one all of them, for a local rank none."""
    with remote_writer(2, 1) as writer:
        assert len(keys_of(writer.export_handle())) == 2
        first, second = (keys_of(writer.export_handle(rank)) for rank in (1, 2))
        assert len(first) == len(second) == 1
        assert first.isdisjoint(second)
        assert keys_of(writer.export_handle(1)) == first
        assert keys_of(writer.export_handle(0)) == set()
        with refuses(ValueError, match="no reader 7"):
            writer.export_handle(7)
        with refuses(ValueError, match="is reader 0's, not reader 1's"):
            MessageQueue.create_from_handle(writer.export_handle(0), 1)
        for_all = dataclasses.replace(writer.export_handle(0), rank=None)
        with refuses(ValueError, match="local"):
            MessageQueue.create_from_handle(for_all, 1)
        for_all = dataclasses.replace(writer.export_handle(1), rank=None)
        with refuses(RankTaken):
            MessageQueue.create_from_handle(for_all, 2)


def test_a_handle_that_was_exported_for_a_rank_needs_none() -> None:
    with remote_writer(1, 1) as writer:
        handles = [Handle.from_json(writer.export_handle(rank).to_json()) for rank in range(2)]
        readers = [MessageQueue.create_from_handle(handle) for handle in handles]
        writer.enqueue("step")
        assert [reader.dequeue(PATIENCE) for reader in readers] == ["step"] * 2
        with refuses(ValueError, match="for every reader: pass the rank as well"):
            MessageQueue.create_from_handle(writer.export_handle())
        for reader in readers:
            reader.close()


def test_round_trips(method: str) -> None:
    """Pickled, as JSON, and in another process its reader can attach with it."""
    with remote_writer(2) as writer:
        handle = writer.export_handle(1)
        assert pickle.loads(pickle.dumps(handle)) == handle
        assert Handle.from_json(handle.to_json()) == handle
        reader = start_reader(Handle.from_json(handle.to_json()), 1, method)
        with MessageQueue.create_from_handle(writer.export_handle(0), 0) as other:
            writer.enqueue("through")
            assert reader.call("dequeue") == other.dequeue(PATIENCE) == "through"
        reader.call("close")


def test_secrets_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Not in a repr, not in the log, not in an error."""
    with caplog.at_level(logging.DEBUG), remote_queue() as (writer, (reader,)):
        handle = writer.export_handle()
        assert writer.handle == handle
        secrets = [handle.remote_server_key, *handle.remote_reader_keys]
        with refuses(RankTaken) as caught:
            MessageQueue.create_from_handle(handle, 0)
        ends = (writer, reader, writer.handle, reader.handle, writer.statistics())
        shown = "".join(map(repr, (handle, *ends)))
        shown += caplog.text + str(caught.value)
        assert not [secret for secret in secrets if secret in shown]
        names = [field.name for field in dataclasses.fields(handle) if not field.repr]
        assert names
        assert all(name.endswith(("_key", "_keys")) for name in names)


def test_ranks_that_nobody_announced_are_remote_readers() -> None:
    """Any other non-negative integer is a remote reader; one more than announced is refused."""
    with remote_writer(2, 1, local_reader_ranks=[5]) as writer:
        everybody = writer.export_handle()
        readers = [MessageQueue.create_from_handle(everybody, rank) for rank in (1 << 40, 0)]
        with refuses(RankTaken, match="2 remote readers"):
            MessageQueue.create_from_handle(everybody, 3)
        with refuses(RankTaken, match="reader 0"):
            MessageQueue.create_from_handle(everybody, 0)
        assert {row.rank for row in writer.statistics().readers} == {5, 0, 1 << 40}
        for reader in readers:
            reader.close()
        with refuses(RankTaken):  # it was attached
            MessageQueue.create_from_handle(everybody, 0)
        for rank in (-1, 1.5, "0", None):
            with refuses(TypeError, ValueError):
                MessageQueue.create_from_handle(everybody, rank)  # type: ignore[arg-type]


def test_a_queue_that_is_gone() -> None:
    """A clear error at attach (M9): a ConnectionError with the address."""
    with remote_writer(remote_liveness=LIVENESS) as writer:
        handle = writer.export_handle()
    with refuses(ConnectionError) as caught:
        MessageQueue.create_from_handle(handle, 0)
    assert isinstance(caught.value, WriterUnreachable)
    assert handle.remote_subscribe_addr is not None
    assert handle.remote_subscribe_addr in str(caught.value)


def test_another_queue_at_that_address_learns_nothing() -> None:
    """A process that took the port cannot prove to be the writer, and is told nothing."""
    with remote_writer(remote_liveness=LIVENESS) as gone:
        handle = gone.export_handle()
    with remote_writer() as other:
        handle.remote_subscribe_addr = other.handle.remote_subscribe_addr
        with refuses(PermissionError, ConnectionError) as caught:
            MessageQueue.create_from_handle(handle, 0)
        assert isinstance(caught.value, (AccessRefused, WriterUnreachable))
        assert other.statistics().readers[0].state == "absent"


FORGED: dict[str, list[Any]] = {
    "remote_subscribe_addr": [
        "",
        "tcp://",
        "ipc:///tmp/x",
        "tcp://1.2.3.4",
        "tcp://h:0",
        "tcp://::1:5",
    ],
    "n_remote_reader": [0, -1, "2", 2.5],
    "remote_liveness": [0, -1, "3", None],
    "remote_server_key": ["", "x", " " * 40, 7],
    "remote_reader_keys": [None, 7, ["x"], [7], {"a": "b"}, ["0" * 40] * 3],
    "relay_of": [5, [1], ["1", "x"], [1, 2], [1, "x", 3]],
    "format_version": [FORMAT_VERSION - 1, FORMAT_VERSION + 1],
    "serializer": ["json"],
    "rank": [-1, "0", 2**63],
}
FORGERIES = [(field, value) for field, values in FORGED.items() for value in values]


@pytest.mark.parametrize(("field", "value"), FORGERIES, ids=repr)
def test_forged_fields_are_refused(field: str, value: Any) -> None:
    """Refused before a connection is made, as JSON and as an object."""
    with remote_writer(2) as writer:
        facts = json.loads(writer.export_handle().to_json())
        with refuses(ValueError):
            Handle.from_json(json.dumps({**facts, field: value}))
        changes: dict[str, Any] = {field: value}
        with refuses(ValueError, TypeError):
            MessageQueue.create_from_handle(
                dataclasses.replace(writer.export_handle(), **changes), 0
            )


@pytest.mark.parametrize(
    "options",
    [
        {"remote_window": 0},
        {"remote_window": 1.5},
        {"remote_window": 2**64},
        {"remote_window_bytes": 0},
        {"remote_window_bytes": 2**70},
        {"remote_liveness": 0},
        {"remote_liveness": float("nan")},
        {"remote_liveness": "3"},
        {"remote_liveness": 3e6},
        {"remote_liveness": 10**400},
        {"listen_on_all": 1},
        {"insecure_network": "no"},
        {"insecure_network": True},
        {"insecure_network": True, "serializer": "pickle"},
        {"connect_ip": 7},
    ],
    ids=repr,
)
@pytest.mark.parametrize("n_remote", [0, 1])
def test_options_that_cannot_be(n_remote: int, options: dict[str, Any]) -> None:
    """Refused before anything is created, as is plaintext with pickle, also of a queue that has no
    remote reader yet."""
    with refuses(ValueError, TypeError):
        MessageQueue(1 + n_remote, 1, **options)


def test_an_insecure_network_works_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It works, with one warning, and has tokens instead of keys."""
    with (
        caplog.at_level(logging.WARNING),
        remote_queue(2, insecure_network=True, serializer="msgpack") as (writer, readers),
    ):
        assert writer.handle.remote_server_key == ""
        assert len(keys_of(writer.export_handle(1))) == 1
        writer.enqueue([1, 2])
        assert [reader.dequeue(PATIENCE) for reader in readers] == [[1, 2]] * 2
    assert len(caplog.records) == 1
    assert "insecure_network" in caplog.text


def test_a_libzmq_without_curve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at the start, by every end: nothing falls back to plaintext."""
    with remote_writer() as writer:
        handle = writer.export_handle(0)
        monkeypatch.setattr(zmq, "has", lambda _what: False)
        for start_it in (
            remote_writer,
            lambda: MessageQueue.create_from_handle(handle, 0),
            lambda: TcpGroup(HERE, 0, 0, 1, secret=SECRET),
        ):
            with refuses(NotImplementedError, match="CURVE"):
                start_it()


def test_local_queues_do_not_load_the_network() -> None:
    """A queue without remote readers does not pay for them."""
    assert start(loads_no_network, method="spawn").result()


def loads_no_network(_link: Link) -> bool:
    import sys

    with MessageQueue(1, 1, None, 64, 2) as writer:
        MessageQueue.create_from_handle(writer.export_handle(), 0).close()
    network = "memlane.broadcast.network", "memlane.broadcast.protocol"
    return not [name for name in sys.modules if name.startswith(network)]
