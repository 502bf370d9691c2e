"""An agent's configuration and a worker's order, for tests that do not depend on their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.protocol.messages import FormOrder, JoinOrder, Restore, Seat, Tier
from holdfast_workers.protocol.run_plan import RunPlan
from holdfast_workers.spec import RankResources, TimeoutsSpec, TrainingSpec


def run_plan(
    training: TrainingSpec | Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    capacity: int = 1,
    gpus_per_worker: float = 0,
    timeouts: Mapping[str, float] | None = None,
    job_env: Mapping[str, str] | None = None,
    **facts: Any,
) -> RunPlan:
    """The plan of the job `job`, whose ranks form `mesh`. `timeouts`: unchecked."""
    spec = TrainingSpec.model_validate(training or {})
    if mesh is not None:
        parallel = spec.parallel.model_copy(update=dict(mesh))
        spec = spec.model_copy(update={"parallel": parallel})
    return RunPlan(
        spec=spec,
        resources=RankResources(workers_per_node=capacity, gpus_per_worker=gpus_per_worker),
        timeouts=TimeoutsSpec().model_copy(update=timeouts),
        env=dict(job_env or {}),
        **{"job_id": "job", "remote_root": "", **facts},
    )


def agent_config(root: Path, **changes: Any) -> AgentConfig:
    """The configuration of agent `n0`, with all folders under `root`; `changes` override fields,
    and parameters of `run_plan`."""
    own = {field.name for field in fields(AgentConfig)} & changes.keys()
    of_plan = {name: value for name, value in changes.items() if name not in own}
    values: dict[str, Any] = {
        "plan": run_plan(**{"remote_root": f"file://{root}/remote", **of_plan}),
        "agent": "n0",
        "node_id": "node",
        "host": "127.0.0.1",
        "secret": b"s" * 32,
        "memory_root": str(root),
        "cache_dir": str(root / "cache"),
    }
    return AgentConfig(**{**values, **{name: changes[name] for name in own}})


def join_order(segment: Path, *, local_world_size: int = 1, **form: Any) -> JoinOrder:
    """The order of the rank with this `segment`, rank 0 and alone in attempt 1 unless `form` says
    otherwise."""
    seat = Seat(form.pop("rank", 0), None, form.pop("restore", Restore(Tier.INIT, 0)))
    local_rank = form.pop("local_rank", 0)
    world: dict[str, Any] = {"attempt": 1, "mesh": {"dp_shard": 1}, "world_size": 1, **form}
    order = FormOrder(**{"store_host": "127.0.0.1", "store_port": 1, "seats": (), **world})
    return JoinOrder(order, seat, str(segment), local_rank, local_world_size)
