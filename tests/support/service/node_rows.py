"""Changes the rows of nodes, as the service or the reports of jobs do."""

from __future__ import annotations

import time
from typing import Any

from tests.support.service.job_drives import until

from holdfast_service.store.engine import Store
from holdfast_service.store.models import NodeRow
from holdfast_workers.protocol.findings import ROOM


async def change_node(store: Store, node: str, **changed: Any) -> None:
    """Change the node's row, once the node has been seen."""

    async def is_changed() -> bool:
        async with store.write() as session:
            row = await session.get(NodeRow, node)
            if row is None:
                return False
            for name, value in changed.items():
                setattr(row, name, value)
            return True

    await until(is_changed, what=f"a sighting of {node}")


async def too_small(store: Store, node: str, tasks: int) -> None:
    """A job has found that the node allows only so many processes and threads."""
    finding = {"probe": ROOM, "kind": "tasks", "what": f"{tasks} tasks", "there": tasks}
    await change_node(store, node, findings=[{**finding, "at": time.time()}])
