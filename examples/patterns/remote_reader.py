"""A reader that attaches over TCP, as on another host."""

import multiprocessing

from memlane import Handle, MessageQueue


def reader(text: str) -> None:
    with MessageQueue.create_from_handle(Handle.from_json(text), 0) as queue:
        print(queue.dequeue(timeout=30))


if __name__ == "__main__":
    with MessageQueue(n_reader=1, n_local_reader=0, connect_ip="127.0.0.1") as queue:
        text = queue.export_handle(0).to_json()  # carries the key of reader 0: a secret
        process = multiprocessing.Process(target=reader, args=(text,))
        process.start()
        queue.wait_until_ready(timeout=30, processes=[process])
        queue.enqueue("encrypted and acknowledged")
    process.join()
    raise SystemExit(process.exitcode)
