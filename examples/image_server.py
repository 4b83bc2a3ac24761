"""A server and its pool of workers: python examples/image_server.py (pip install . fastapi httpx)

Each worker is a process of its own: an image goes to the worker that has the least to do, and
its answer is awaited, without threads. A worker that dies fails the requests that it has, and is
replaced before the next one.

Behind a web server: uvicorn --app-dir examples image_server:app
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import numpy as np
from fastapi import FastAPI, HTTPException, Request

from memlane import MemlaneError, WorkerGroup

WORKERS, MOST_BYTES, SECONDS = 2, 8 << 20, 30.0
Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class Worker:
    """The state of a worker's process, such as a model."""

    def __init__(self, rank: int, world: int) -> None:
        self._axes = (0, 1)

    def mean(self, image: Pixels) -> list[float]:
        """The mean colour. An image of 1 MiB or more is read in shared memory."""
        colour: list[float] = image.mean(axis=self._axes).tolist()
        return colour


class Pool:
    """The workers, and how many requests each has."""

    def __init__(self, group: WorkerGroup[Worker]) -> None:
        self.group = group
        self._requests = [0] * group.world

    async def mean_of(self, image: Pixels) -> list[float]:
        """Asks the worker with the fewest requests."""
        rank = self._requests.index(min(self._requests))
        self._requests[rank] += 1
        try:
            [mean] = await self.group[rank].acall(Worker.mean, image)
            return mean
        finally:
            self._requests[rank] -= 1


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The pool lives as long as the server."""
    with WorkerGroup(Worker, WORKERS, on_death="replace") as group:
        app.state.pool = Pool(group)
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/mean")
async def mean(request: Request, width: int, height: int) -> list[float]:
    """Takes an RGB image as the body: width * height * 3 bytes."""
    body = await request.body()
    if min(width, height) < 1 or len(body) != width * height * 3 or len(body) > MOST_BYTES:
        raise HTTPException(400, f"{len(body)} bytes are no {width} x {height} RGB image")
    image = np.frombuffer(body, np.uint8).reshape(height, width, 3)
    pool: Pool = app.state.pool
    try:
        async with asyncio.timeout(SECONDS):
            return await pool.mean_of(image)
    except (MemlaneError, TimeoutError) as error:
        raise HTTPException(503, f"try again: {error!r}") from error


def main() -> None:
    """Sends images, kills a worker, and sends more."""
    from fastapi.testclient import TestClient

    dice = np.random.default_rng(7)
    images = [dice.integers(0, 256, (480, 640, 3), np.uint8) for _ in range(40)]

    def ask(image: Pixels) -> int:
        height, width, _ = image.shape
        for attempt in itertools.count(1):
            where = f"/mean?width={width}&height={height}"
            answer = client.post(where, content=image.tobytes())
            if answer.status_code == 200:
                assert np.allclose(answer.json(), image.mean(axis=(0, 1)))
                return attempt
            print(f"{answer.status_code}: {answer.json()['detail']}")
        raise AssertionError

    with TestClient(app) as client, ThreadPoolExecutor(8) as clients:
        attempts = list(clients.map(ask, images + images))
        print(f"{len(attempts)} right answers, {len(images)} images")
        victim = app.state.pool.group.pids[0]
        os.kill(victim, signal.SIGKILL)
        attempts = list(clients.map(ask, images))
        print(f"{len(attempts)} right answers after worker {victim} was killed")
        print(client.post("/mean?width=3&height=5", content=b"x").json()["detail"])


if __name__ == "__main__":
    main()
