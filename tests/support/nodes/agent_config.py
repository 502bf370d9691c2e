"""An agent's configuration and a worker's order, for tests that do not depend on their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.protocol.messages import FormOrder, JoinOrder, Restore, Seat, Tier


def agent_config(root: Path, **changes: Any) -> AgentConfig:
    """The configuration of agent `n0`, with all folders under `root`; `changes` override fields."""
    fields: dict[str, Any] = {
        "job_id": "job",
        "agent": "n0",
        "node_id": "node",
        "host": "127.0.0.1",
        "training": {},
        "mesh": {"dp_shard": 1},
        "capacity": 1,
        "secret": b"s" * 32,
        "memory_root": str(root),
        "cache_dir": str(root / "cache"),
        "remote_root": f"file://{root}/remote",
    }
    return AgentConfig(**{**fields, **changes})


def join_order(segment: Path, *, local_world_size: int = 1, **form: Any) -> JoinOrder:
    """The order of the rank with this `segment`, rank 0 and alone in attempt 1 unless `form` says
    otherwise."""
    seat = Seat(form.pop("rank", 0), None, form.pop("restore", Restore(Tier.INIT, 0)))
    local_rank = form.pop("local_rank", 0)
    fields: dict[str, Any] = {"attempt": 1, "mesh": {"dp_shard": 1}, "world_size": 1, **form}
    order = FormOrder(**{"store_host": "127.0.0.1", "store_port": 1, "seats": (), **fields})
    return JoinOrder(order, seat, str(segment), 10.0, local_rank, local_world_size)
