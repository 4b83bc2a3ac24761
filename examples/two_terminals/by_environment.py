"""A program passes the handle of its queue to one that it starts, in an environment variable."""

import os
import subprocess
import sys

from memlane import MessageQueue

READER = """
import os
from memlane import Handle, MessageQueue

with MessageQueue.create_from_handle(Handle.from_json(os.environ["STEPS"])) as queue:
    for message in queue:
        print(message, flush=True)
"""

with MessageQueue(n_reader=1) as queue:
    steps = queue.export_handle(0).to_json()
    reader = subprocess.Popen([sys.executable, "-c", READER], env={**os.environ, "STEPS": steps})
    queue.wait_until_ready(timeout=30, processes=[reader])  # one that fails is named at once
    queue.enqueue("by an environment variable")
print("exit code", reader.wait())
