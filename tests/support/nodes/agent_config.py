"""A node agent's configuration for tests that do not depend on its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast_workers.agent.agent_config import AgentConfig


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
