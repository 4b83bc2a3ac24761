"""A FastAPI application with a group of workers: each request is a call."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException

from memlane import WorkerDied, WorkerGroup

WORKERS = 2


class Model:
    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank

    def generate(self, prompt: str) -> str:
        return f"{prompt.upper()} from worker {self.rank}"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    group = await asyncio.to_thread(WorkerGroup, Model, WORKERS, on_death="replace")
    with group:
        app.state.group = group
        yield


app, numbers = FastAPI(lifespan=lifespan), itertools.count()


@app.get("/generate")
async def generate(prompt: str) -> dict[str, str]:
    worker = app.state.group[next(numbers) % WORKERS]  # each request to the next worker
    try:
        (text,) = await worker.acall(Model.generate, prompt)
    except WorkerDied as death:
        raise HTTPException(503, str(death)) from None
    return {"text": text}


if __name__ == "__main__":
    from fastapi.testclient import TestClient

    with TestClient(app) as client:
        print(client.get("/generate", params={"prompt": "hello"}).json())
