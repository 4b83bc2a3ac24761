"""MessageQueue.recv: one pickled object from a socket that the caller trusts."""

import math
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from memlane import MessageQueue, TimedOut
from tests.support import PATIENCE, Link, start
from tests.support.queues import refuses


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    with zmq.Context() as own:
        yield own


@pytest.fixture
def pair(context: "zmq.Context[Any]") -> Iterator[tuple[Any, Any]]:
    with context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://recv")
        other.connect("inproc://recv")
        yield one, other


def send(_link: Link, address: str, message: object) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(address)
        socket.send_pyobj(message)


MESSAGES = [None, 7, "text", {"a": [1, 2]}, b"x" * 1_000_000]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: repr(message)[:12])
@pytest.mark.parametrize("timeout", [1000, 1000.0, None, math.inf])
def test_an_object_arrives(pair: tuple[Any, Any], message: object, timeout: float | None) -> None:
    """An object that was sent pickled comes back as it was."""
    one, other = pair
    other.send_pyobj(message)
    assert MessageQueue.recv(one, timeout) == message


def test_objects_are_received_one_by_one_in_order(pair: tuple[Any, Any]) -> None:
    """Every call takes one message, also one that is there already with no time to wait."""
    one, other = pair
    for number in range(5):
        other.send(pickle.dumps(number))
    MessageQueue.recv(one, PATIENCE)
    assert [MessageQueue.recv(one, 0) for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize("timeout", [0, 0.05, -1, -math.inf])
def test_a_timeout_loses_no_late_message(pair: tuple[Any, Any], timeout: float) -> None:
    """TimeoutError when none comes, not early; the message that is late is not lost."""
    one, other = pair
    before = time.monotonic()
    with refuses(TimeoutError) as caught:
        MessageQueue.recv(one, timeout)
    assert time.monotonic() - before >= max(timeout, 0)
    assert isinstance(caught.value, TimedOut)
    other.send_pyobj("late")
    assert MessageQueue.recv(one, PATIENCE) == "late"


def test_nan_is_refused_as_a_timeout(pair: tuple[Any, Any]) -> None:
    """NaN is no timeout."""
    with refuses(ValueError):
        MessageQueue.recv(pair[0], math.nan)


def test_the_socket_is_left_as_it_was(pair: tuple[Any, Any]) -> None:
    """Options of the caller's socket are not changed, neither by success nor by a timeout."""
    one, other = pair
    one.setsockopt(zmq.RCVTIMEO, 1234)
    other.send_pyobj(1)
    MessageQueue.recv(one, PATIENCE)
    with refuses(TimeoutError):
        MessageQueue.recv(one, 0)
    assert one.getsockopt(zmq.RCVTIMEO) == 1234
    assert not one.closed


def test_what_comes_is_the_callers_own(pair: tuple[Any, Any]) -> None:
    """Arrays that arrive are writable."""
    one, other = pair
    other.send(pickle.dumps(np.arange(100_000), protocol=5))
    array = MessageQueue.recv(one, PATIENCE)
    array[:] = 0
    assert not array.any()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_any_process_may_send(
    context: "zmq.Context[Any]", tmp_path: Path, method: str, transport: str
) -> None:
    """The sender may be any process."""
    with context.socket(zmq.PULL) as socket:
        socket.bind(f"ipc://{tmp_path}/s" if transport == "ipc" else "tcp://127.0.0.1:*")
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        sender = start(send, address, {"from": "afar"}, method=method)
        assert MessageQueue.recv(socket, PATIENCE) == {"from": "afar"}
        sender.result()


def test_recv_is_static() -> None:
    """It needs no queue."""
    assert isinstance(vars(MessageQueue)["recv"], staticmethod)
