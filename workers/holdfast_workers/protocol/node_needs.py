"""What a job needs of each of its nodes, as the service computes it and agents check it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeNeeds:
    """The least that one node needs. 0: not known, and then not checked."""

    shm_bytes: int = 0
    """Bytes of the file system for checkpoints in memory: those of the node's ranks, and copies of
    others."""
    ram_bytes: int = 0
    """Memory, that of these checkpoints included."""
    tasks: int = 0
    """Processes and threads."""
    nodes: int = 1
    """The number of nodes with which the job can do: so many of one machine may share its
    memory."""
