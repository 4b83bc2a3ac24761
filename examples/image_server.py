"""A server and its pool of workers: python examples/image_server.py (pip install . fastapi httpx)

Each worker is a process with a queue of steps, a queue of answers and a store of images. An image
is put into the store of the worker that has the least to do, where it is read without another copy;
the same image again is not even copied once. Messages are awaited, without threads. A worker that
dies fails the requests that it has, and is replaced, also if it dies as it starts.

Behind a web server: uvicorn --app-dir examples image_server:app
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection

import numpy as np
from fastapi import FastAPI, HTTPException, Request

from memlane import (
    Handle,
    MemlaneError,
    MessageQueue,
    PeerDied,
    ReaderDied,
    SegmentMissing,
    ShmObjectStorageHandle,
    SingleWriterShmObjectStorage,
    SingleWriterShmRingBuffer,
)

WORKERS, MOST_AT_ONCE, MOST_BYTES, SECONDS = 2, 4, 16 << 20, 30.0
Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Place = tuple[int, int]
Step = tuple[int, Place]
Answer = tuple[int, list[float]]


def work(steps_of: Handle, images_of: ShmObjectStorageHandle, server: Connection) -> None:
    """The worker's process: the mean colour of each image."""
    steps: MessageQueue[Step]
    answers: MessageQueue[Answer]
    try:
        with (
            MessageQueue.create_from_handle(steps_of, 0) as steps,
            SingleWriterShmObjectStorage.create_from_handle(images_of) as images,
            MessageQueue(n_reader=1, n_local_reader=1) as answers,
        ):
            server.send(answers.export_handle(0))
            for number, place in steps:
                with images.view(*place) as pixels:  # in the store's memory
                    mean = pixels.mean(axis=(0, 1)).tolist()
                    del pixels
                answers.enqueue((number, mean))
    except (PeerDied, SegmentMissing):
        pass  # the server was killed, or has ended before this had begun


class Worker:
    """The server's side of a worker."""

    def __init__(
        self,
        pid: int,
        steps: MessageQueue[Step],
        answers: MessageQueue[Answer],
        images: SingleWriterShmObjectStorage,
    ) -> None:
        self.pid = pid
        self._steps, self._answers, self._images = steps, answers, images
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[list[float]]] = {}
        self._room = asyncio.Semaphore(MOST_AT_ONCE)
        self._sending = asyncio.Lock()  # one call at a time on a queue

    @property
    def load(self) -> int:
        """How many requests it has."""
        return len(self._waiting)

    async def mean_of(self, image: Pixels) -> list[float]:
        """Asks the worker. Raises ReaderDied if it is dead and was not asked, and other errors of
        memlane if it dies meanwhile or has no room for the image."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with self._room:
                async with self._sending:
                    await self._send(number, image)
                mean: list[float] = await answer
                return mean
        finally:
            del self._waiting[number]

    async def _send(self, number: int, image: Pixels) -> None:
        key = hashlib.sha256(image.data).hexdigest() + str(image.shape)
        images = self._images
        place = images.get_cached(key) if images.is_cached(key) else images.put(key, image)
        try:
            await self._steps.aenqueue((number, place), timeout=SECONDS)
        except BaseException:  # also if the client has left meanwhile
            images.drop_reference(key)
            raise

    async def deliver(self) -> None:
        """Hands each answer to the request that waits for it, until the worker ends."""
        try:
            async for number, mean in self._answers:
                answer = self._waiting.get(number)
                if answer is not None and not answer.done():  # else its client has left
                    answer.set_result(mean)
        except PeerDied as error:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)
                    answer.exception()  # seen, also if its request is being sent, and fails by that


@asynccontextmanager
async def started() -> AsyncIterator[Worker]:
    """A new worker; it ends with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    ring = SingleWriterShmRingBuffer((MOST_AT_ONCE + 1) * MOST_BYTES, create=True)
    steps: MessageQueue[Step]
    answers: MessageQueue[Answer]
    async with AsyncExitStack() as last:
        with (
            SingleWriterShmObjectStorage(MOST_BYTES, 1, ring, unlink_when_complete=True) as images,
            MessageQueue(n_reader=1, n_local_reader=1) as steps,
        ):
            handles = steps.export_handle(0), images.handle()
            process = context.Process(target=work, args=(*handles, there))
            process.start()
            last.push_async_callback(asyncio.to_thread, process.join)  # once all of this is closed
            there.close()
            handle = await asyncio.to_thread(here.recv)
            with MessageQueue.create_from_handle(handle, 0) as answers:
                await asyncio.to_thread(steps.wait_until_ready, SECONDS, processes=[process])
                yield Worker(process.pid or 0, steps, answers, images)


class Pool:
    """The workers that are alive."""

    def __init__(self) -> None:
        self.workers: set[Worker] = set()
        self.has_any = asyncio.Event()

    async def keep_one(self) -> None:
        """Has one worker at a time, until it is cancelled."""
        while True:
            try:
                async with started() as worker:
                    self.workers.add(worker)
                    self.has_any.set()
                    try:
                        await worker.deliver()
                    finally:
                        self._drop(worker)
            except (EOFError, MemlaneError) as error:
                print(f"a worker ended as it started: {error!r}", file=sys.stderr)
                await asyncio.sleep(1.0)  # it may do so again

    def _drop(self, worker: Worker) -> None:
        self.workers.discard(worker)
        if not self.workers:
            self.has_any.clear()

    async def mean_of(self, image: Pixels) -> list[float]:
        """Asks the worker with the fewest requests."""
        while True:
            await self.has_any.wait()
            worker = min(self.workers, key=lambda worker: worker.load)
            try:
                return await worker.mean_of(image)
            except ReaderDied:  # nothing was sent, so another may be asked
                self._drop(worker)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The pool lives as long as the server."""
    app.state.pool = Pool()
    async with asyncio.TaskGroup() as tasks:
        keeping = [tasks.create_task(app.state.pool.keep_one()) for _ in range(WORKERS)]
        await app.state.pool.has_any.wait()
        yield
        for task in keeping:
            task.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/mean")
async def mean(request: Request, width: int, height: int) -> list[float]:
    """Of the RGB image in the body: width * height * 3 bytes."""
    body = await request.body()
    if min(width, height) < 1 or len(body) != width * height * 3 or len(body) > MOST_BYTES // 2:
        raise HTTPException(400, f"{len(body)} bytes are no {width} x {height} RGB image")
    image = np.frombuffer(body, np.uint8).reshape(height, width, 3)
    pool: Pool = app.state.pool
    try:
        async with asyncio.timeout(SECONDS):
            return await pool.mean_of(image)
    except (MemlaneError, TimeoutError) as error:
        raise HTTPException(503, f"try again: {error}") from error


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
        victim = next(iter(app.state.pool.workers)).pid
        os.kill(victim, signal.SIGKILL)
        attempts = list(clients.map(ask, images))
        print(f"{len(attempts)} right answers after worker {victim} was killed")
        print(client.post("/mean?width=3&height=5", content=b"x").json()["detail"])


if __name__ == "__main__":
    main()
