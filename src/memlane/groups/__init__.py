"""Groups of processes that build queues together: torch's, memlane's own, or yours."""

from memlane.groups.opening import collectives_of
from memlane.groups.tcp import TcpGroup

__all__ = ["TcpGroup", "collectives_of"]
