"""Starts a process in each way that runs Python anew, prints their pids; ends with its input."""

import sys
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.synchronize import Event


def main() -> None:
    started = []
    contexts: list[SpawnContext | ForkServerContext] = [SpawnContext(), ForkServerContext()]
    for context in contexts:
        ready = context.Event()
        ends = context.Event()
        process = context.Process(target=wait, args=(ready, ends))
        process.start()
        ready.wait()
        started.append((process, ends))
    print(*(process.pid for process, _ in started), flush=True)
    sys.stdin.read()
    for process, ends in started:
        ends.set()
        process.join()


def wait(ready: Event, ends: Event) -> None:
    ready.set()
    ends.wait()


if __name__ == "__main__":
    main()
