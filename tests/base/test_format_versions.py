"""Handles, messages, stored objects and segments of another version are refused, by both sides.

Those below are of an early version, whose messages name functions of memlane that have moved since.
In version 4, and 2 of stored objects, tensors had no strides: it cannot decode what this one sends.
"""

import pickle
from base64 import b64decode
from dataclasses import replace

import pytest

from memlane import (
    CorruptMessage,
    Handle,
    InvalidArgument,
    LayoutMismatch,
    MessageQueue,
    PickleMsgpackSerde,
)
from memlane.broadcast.handle import FORMAT_VERSION
from memlane.broadcast.protocol.frames import VERSION, header_of
from tests.support.queues import path_of, refuses

pytestmark = pytest.mark.unit

HANDLE_OF_VERSION_3 = b64decode(
    "gASVkwEAAAAAAACMGG1lbWxhbmUuYnJvYWRjYXN0LmhhbmRsZZSMBkhhbmRsZZSTlCmBlH2UKIwSbG9jYWxfcmVhZGVy"
    "X3JhbmtzlF2USwBhjA1idWZmZXJfaGFuZGxllChLAU0AEEsEjChtZW1sYW5lLTBmMGYwZjBmMGYwZjBmMGYwZjBmMGYw"
    "ZjBmMGYwZjBmlHSUjBRsb2NhbF9zdWJzY3JpYmVfYWRkcpROjBVyZW1vdGVfc3Vic2NyaWJlX2FkZHKUTowQcmVtb3Rl"
    "X2FkZHJfaXB2NpSJjA5mb3JtYXRfdmVyc2lvbpRLA4wIcXVldWVfaWSUjCAwZjBmMGYwZjBmMGYwZjBmMGYwZjBmMGYw"
    "ZjBmMGYwZpSMCnNlcmlhbGl6ZXKUjAZwaWNrbGWUjA9uX3JlbW90ZV9yZWFkZXKUSwCMD3JlbW90ZV9saXZlbmVzc5RH"
    "QAgAAAAAAACMEXJlbW90ZV9zZXJ2ZXJfa2V5lIwAlIwScmVtb3RlX3JlYWRlcl9rZXlzlF2UjAhyZWxheV9vZpROdWIu"
)
"""`pickle.dumps(Handle(queue_id="0f" * 16, local_reader_ranks=[0], buffer_handle=...))`"""
FRAME_OF_VERSION_3 = b64decode(
    "bWxxAwEBAAAHAAAAAAAAAAAAAAAAAAAAAAAAAAEAAAAAAAAAAAAAAG8AAAAAAAAAgAWVZAAAAAAAAACMDm1lbWxhbmUu"
    "X3RvcmNolIwPX3JlYnVpbGRfdGVuc29ylJOUKJYYAAAAAAAAAAAAAAAAAAAAAQAAAAAAAAACAAAAAAAAAJSMBXRvcmNo"
    "lIwFaW50NjSUk5RLA4WUiXSUUpQu"
)
"""A message on the network: `torch.arange(3)`."""
OBJECT_OF_VERSION_1 = b64decode(
    "bWxzAQcAAAAAAAAAkhaTzM0IBAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAIAFlcIAAAAAAAAAjA5tZW1s"
    "YW5lLl90b3JjaJSMD19yZWJ1aWxkX3NwYXJzZZSTlCiME3RvcmNoLnNlcmlhbGl6YXRpb26UjAtfZ2V0X2xheW91dJST"
    "lIwQdG9yY2guc3BhcnNlX2Nvb5SFlFKUXZQoaACMD19yZWJ1aWxkX3RlbnNvcpSTlCiXjAV0b3JjaJSMBWludDY0lJOU"
    "SwFLAYaUiXSUUpRoCyiXaAyMB2Zsb2F0MzKUk5RLAYWUiXSUUpSIZUsChZSJdJRSlC4AAAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACAPwAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=="
)
"""As stored by PickleMsgpackSerde: a sparse tensor, of which two parts are tensors."""


@pytest.mark.parametrize("version", [3, 4])
def test_a_pickled_handle_of_an_older_version_can_be_passed_on(version: int) -> None:
    """It can be unpickled and passed on; attaching states both versions."""
    handle = pickle.loads(HANDLE_OF_VERSION_3)
    assert handle.format_version == 3
    handle.format_version = version
    states_both = (
        f"version {version}, this memlane reads version {FORMAT_VERSION}; use the same version"
    )
    with pytest.raises(InvalidArgument, match=states_both):
        MessageQueue.create_from_handle(handle, 0)
    with pytest.raises(InvalidArgument, match=states_both):
        Handle.from_json(handle.to_json())


@pytest.mark.parametrize("version", [4, 6])
def test_a_segment_of_another_layout_is_refused(version: int) -> None:
    """Its sections lie elsewhere."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        with open(path_of(writer), "r+b") as file:
            at = file.read().index(b"MEMLANE1") + 8
            file.seek(at)
            assert file.read(4) == (5).to_bytes(4, "little")
            file.seek(at)
            file.write(version.to_bytes(4, "little"))
        with refuses(LayoutMismatch, match=f"layout version {version}, this memlane has version 5"):
            MessageQueue.create_from_handle(writer.export_handle(), 0)


def test_a_handle_of_a_newer_version_is_refused() -> None:
    """As a reader of that version before sees today's."""
    handle = replace(pickle.loads(HANDLE_OF_VERSION_3), format_version=FORMAT_VERSION + 1)
    with pytest.raises(
        InvalidArgument, match=f"version {FORMAT_VERSION + 1}, this memlane reads version"
    ):
        MessageQueue.create_from_handle(handle, 0)


@pytest.mark.parametrize("version", [3, 4, VERSION + 1])
def test_a_message_of_another_version_is_refused(version: int) -> None:
    """Its header is refused, so nothing of it is decoded."""
    frame = FRAME_OF_VERSION_3[:3] + bytes((version,)) + FRAME_OF_VERSION_3[4:]
    with pytest.raises(CorruptMessage, match=f"version {version} of .* version {VERSION};"):
        header_of(frame)


@pytest.mark.parametrize("version", [1, 2, 4])
def test_a_stored_object_of_another_version(version: int) -> None:
    """Nothing of it is decoded."""
    stored = OBJECT_OF_VERSION_1[:3] + bytes((version,)) + OBJECT_OF_VERSION_1[4:]
    with pytest.raises(CorruptMessage, match=f"version {version}, this memlane reads version 3;"):
        PickleMsgpackSerde().deserialize(memoryview(stored))
