"""Code that also runs on nodes without Holdfast: the start of an agent, and the sweep of a node.

Ray gets this module by value: its code uses the standard library, Ray, and what it imports itself.
An actor whose class cannot be imported would be dead for ever, and its seat lost. The sweep uses
the standard library only: it also runs where jobs may have run code that their server sent.
"""

from __future__ import annotations

from typing import Any

AGAIN_S = 60.0
"""Time that an agent that could not start waits before Ray starts its process again."""
INSTALLED_AFTER_S = 300.0
"""Time that an agent waits where software is missing: each new process costs events of the job, and
a person has to install something first. It is shorter than the time for which a node without
software is left out of the placement (`Pace.node_room_fresh_s`), so the report stays fresh
while the seat is held."""


def own_versions() -> dict[str, str]:
    """The versions of this process that supervisor and agents must share."""
    import sys

    import ray

    return {
        "python": ".".join(str(number) for number in sys.version_info[:2]),
        "ray": ray.__version__,
    }


class StartedAgent:
    """An agent, or the report of its node that none can run there."""

    def __init__(self, document: bytes, versions: dict[str, str]) -> None:
        """`document`: its `AgentSeat`. `versions`: of Python and Ray, as the node must have them.
        Never raises: Ray would not start this actor again."""
        self._agent: Any = None
        self._refusal: dict[str, Any] = {}
        there = own_versions()
        error, lacks_software = "", True
        if there == versions:
            try:
                from holdfast_service.cluster.agent_actor import AgentActor

                lacks_software = False
                self._agent = AgentActor(document)
            except Exception as fault:  # reported by every answer
                lacks_software = lacks_software or isinstance(fault, ImportError)
                error = f"{type(fault).__name__}: {fault}"
        if self._agent is None:
            self._refuse(there, error, lacks_software)

    def execute(self, document: bytes) -> bytes | dict[str, Any]:
        """See `AgentActor.execute`; a dictionary is the report that there is no agent."""
        if self._agent is None:
            return self._refusal
        answer: bytes = self._agent.execute(document)
        return answer

    def release(self) -> None:
        if self._agent is not None:
            self._agent.release()

    def _refuse(self, there: dict[str, str], error: str, lacks_software: bool) -> None:
        import os
        import threading
        import time

        import ray

        self._refusal = {
            "error": error,
            "lacks_software": lacks_software,
            "versions": there,
            "node_id": ray.get_runtime_context().get_node_id(),
            "host": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "incarnation": f"{os.getpid()}-{time.time():.3f}",
        }
        again = threading.Timer(INSTALLED_AFTER_S if lacks_software else AGAIN_S, os._exit, (1,))
        again.daemon = True
        again.start()


def sweep_this_node(folder: str) -> None:
    """Remove what a job's dead agents left in the shared memory of a node: this folder below
    `memory_base` (`holdfast_workers/memory/node_folder.py`)."""
    import contextlib
    import os
    import shutil
    from pathlib import Path

    base = Path(os.environ.get("HOLDFAST_SHM_ROOT", f"/dev/shm/holdfast-{os.getuid()}"))
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(base / folder)
