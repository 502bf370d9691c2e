"""An agent's configuration and a worker's order, for tests that do not depend on their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.protocol.messages import JoinOrder, Restore, Tier


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


def join_order(root: Path, segment: Path) -> JoinOrder:
    """The order of rank 0, alone in attempt 1, whose segment is `segment` below `root`."""
    return JoinOrder(
        attempt=1,
        rank=0,
        world_size=1,
        mesh={"dp_shard": 1},
        store_host="127.0.0.1",
        store_port=1,
        restore=Restore(Tier.INIT, 0),
        segment_root=str(root),
        segment_path=str(segment),
        timeout_s=10.0,
        device="cpu",
    )
