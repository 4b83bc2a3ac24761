"""Reads what writer.py writes, whichever of the two is started first: `python reader.py`."""

from memlane import MessageQueue

with MessageQueue.open("steps", timeout=60) as queue:
    for message in queue:  # until the writer closes, or WriterDied
        print(message)
