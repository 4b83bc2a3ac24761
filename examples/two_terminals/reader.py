"""Reads what writer.py writes; start writer.py first: `python reader.py FOLDER`."""

import sys
from pathlib import Path

from memlane import Handle, MessageQueue

handle = Handle.from_json((Path(sys.argv[1]) / "steps.json").read_text())
with MessageQueue.create_from_handle(handle) as queue:
    for message in queue:  # until the writer closes, or WriterDied
        print(message)
