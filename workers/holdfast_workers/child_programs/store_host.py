"""The rendezvous store of a node: a torch TCPStore in a process of its own, outside every rank.

It outlives any rank, and each attempt uses its own prefix of keys. It ends with its agent. It
listens on the node's address only: by default, a TCPStore listens on every interface.
"""

from __future__ import annotations

import contextlib
import datetime
import socket

from torch._C._distributed_c10d import TCPStore

from holdfast_workers.ipc import control_channel
from holdfast_workers.protocol.processes import AskStorePort, StorePort

IDLE_LIMIT = datetime.timedelta(days=1)
BACKLOG = 1024


def run(end: socket.socket, host: str) -> int:
    """Serve until the agent closes its end of the control socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=IDLE_LIMIT,
        master_listen_fd=listener.detach(),
    )
    with contextlib.suppress(control_channel.ControlClosed):  # the agent has closed its end
        while True:
            control_channel.send(end, StorePort(store.port))
            control_channel.receive(end, AskStorePort)
    return 0
