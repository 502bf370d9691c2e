"""The rendezvous store of a node: a torch TCPStore in a process of its own, outside every rank.

It outlives any rank, and each attempt uses its own prefix of keys; for programs, which use no
prefix, each attempt gets a store of its own. It ends with its agent. It
listens on the node's address only: by default, a TCPStore listens on every interface.
"""

from __future__ import annotations

import contextlib
import datetime
import socket

from torch._C._distributed_c10d import TCPStore

from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.listening import PortRange, PortsExhausted, listen
from holdfast_workers.protocol.processes import AskStorePort, StoreJob, StorePort

IDLE_LIMIT = datetime.timedelta(days=1)
BACKLOG = 1024


def run(end: socket.socket, job: StoreJob) -> int:
    """Serve until the agent closes its end of the control socket."""
    attempt = 0
    try:
        store = _open(job)
        with contextlib.suppress(control_channel.ControlClosed):  # the agent has closed its end
            while True:
                control_channel.send(end, StorePort(store.port, attempt=attempt))
                asked = control_channel.receive(end, AskStorePort)
                if asked.attempt > attempt:
                    del store  # its clients have been ended, and its port may be needed
                    store, attempt = _open(job), asked.attempt
    except PortsExhausted as error:
        control_channel.send(end, StorePort(0, str(error)))
        return 1
    return 0


def _open(job: StoreJob) -> TCPStore:
    """Raises PortsExhausted."""
    listener = listen(job.host, PortRange.parse(job.ports), BACKLOG)
    return TCPStore(
        job.host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=IDLE_LIMIT,
        master_listen_fd=listener.detach(),
    )
