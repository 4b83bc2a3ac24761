"""An input that many calls read is in shared memory once."""

import numpy as np

from memlane import WorkerGroup


class Encoder:
    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank

    def mean(self, image: np.ndarray) -> float:  # read-only, in shared memory
        return float(image.mean())


if __name__ == "__main__":
    with WorkerGroup(Encoder, 2, store=64 << 20) as group:
        image = group.store.find("cat.png") or group.store.put("cat.png", np.ones((1024, 1024)))
        print(group.call("mean", image))  # [1.0, 1.0]
        print(group[1].call("mean", image))  # [1.0], and nothing is copied
