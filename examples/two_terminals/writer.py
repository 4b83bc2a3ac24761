"""Writes three steps to a reader that somebody else starts: `python writer.py FOLDER`."""

import os
import sys
from pathlib import Path

from memlane import MessageQueue

folder = Path(sys.argv[1])
with MessageQueue(n_reader=1, name="steps") as queue:
    new = folder / "steps.new"
    new.write_text(queue.export_handle(0).to_json())
    os.replace(new, folder / "steps.json")  # a reader finds all of the handle, or none
    print("waiting for a reader", flush=True)
    queue.wait_until_ready(timeout=60)
    for step in range(3):
        queue.enqueue({"step": step})
(folder / "steps.json").unlink()
