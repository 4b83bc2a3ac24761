"""Writes three steps to a reader that somebody else starts: `python writer.py`."""

from memlane import MessageQueue

with MessageQueue(n_reader=1, name="steps", serve=True) as queue:
    print("waiting for a reader", flush=True)
    queue.wait_until_ready(timeout=60)
    for step in range(3):
        queue.enqueue({"step": step})
