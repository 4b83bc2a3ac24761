"""The object store: one writer puts objects by key, readers on its host get them by address."""

from memlane.store.handle import ShmObjectStorageHandle
from memlane.store.ring import SingleWriterShmRingBuffer
from memlane.store.serde import MsgpackSerde, ObjectSerde, PickleMsgpackSerde
from memlane.store.statistics import StoreReaderStatistics, StoreStatistics
from memlane.store.storage import SingleWriterShmObjectStorage, StoreBlocker

__all__ = [
    "MsgpackSerde",
    "ObjectSerde",
    "PickleMsgpackSerde",
    "ShmObjectStorageHandle",
    "SingleWriterShmObjectStorage",
    "SingleWriterShmRingBuffer",
    "StoreBlocker",
    "StoreReaderStatistics",
    "StoreStatistics",
]
