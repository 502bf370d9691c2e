"""A process that loads a checkpoint from a bucket into the memory of a rank.

It has the bucket's credentials and runs no users' code. It is forked from the storage zygote and
ends when done.
"""

from __future__ import annotations

import socket
from pathlib import Path

from holdfast_workers.ipc import control_channel
from holdfast_workers.protocol.processes import LoadOrder, StorageZygoteConfig
from holdfast_workers.worker.remote_loading import fill_shared


def load(end: socket.socket, order: LoadOrder, config: StorageZygoteConfig) -> int:
    """Carry out the order; answers with its outcome."""
    outcome = fill_shared(order, config.storage, Path(config.storage_fault_file))
    control_channel.send(end, outcome)
    return 0
