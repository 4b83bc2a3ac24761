"""A serde that stores audio as a header and samples."""

import struct
from typing import Any, NamedTuple

import numpy as np

from memlane import ObjectSerde, SingleWriterShmObjectStorage, SingleWriterShmRingBuffer

HEADER = struct.Struct("<4sIQ")  # magic, samples per second, number of samples


class Audio(NamedTuple):
    rate: int
    samples: np.ndarray[Any, np.dtype[np.float32]]


class AudioSerde(ObjectSerde):
    def serialize(self, value: Audio) -> Any:
        samples = np.ascontiguousarray(value.samples, np.float32)
        header = HEADER.pack(b"AUD1", value.rate, samples.size)
        return [samples.data.cast("B")], samples.nbytes, header, len(header)

    def deserialize(self, data: memoryview) -> Audio:
        in_place = self.deserialize_view(data)
        return Audio(in_place.rate, in_place.samples.copy())

    def deserialize_view(self, data: memoryview) -> Audio:
        magic, rate, count = HEADER.unpack_from(data)  # copied: another process may write to data
        if magic != b"AUD1" or HEADER.size + 4 * count > len(data):
            raise ValueError("not an audio object")
        return Audio(rate, np.frombuffer(data, np.float32, count, HEADER.size))


if __name__ == "__main__":
    ring = SingleWriterShmRingBuffer(8 << 20, create=True)
    with SingleWriterShmObjectStorage(1 << 20, 1, ring, AudioSerde) as writer:
        place = writer.put("beep", Audio(16_000, np.ones(16_000, np.float32)))
        with SingleWriterShmObjectStorage.create_from_handle(writer.handle()) as reader:
            print(f"{len(reader.get(*place).samples)} samples at {reader.get(*place).rate} Hz")
