"""Segments, who holds them and who is stuck, looked at from any process of the same user.

for wait in memlane.inspect.stuck():
    print(wait.segment, wait.waiter.pid, wait.reason, [who.pid for who in wait.awaited])

Looking only reads: it takes no lock, maps nothing, and the watched processes do not notice. Each
call shows one moment, and what changes meanwhile may be seen half. What waits for readers on other
hosts is not in shared memory; the log names it.
"""

from memlane.inspect.segment import Deliveries, Participant, Segment, leftovers, segments
from memlane.inspect.waits import Wait, stuck

__all__ = ["Deliveries", "Participant", "Segment", "Wait", "leftovers", "segments", "stuck"]
