"""From the arguments of a `TorchTrainer` to a job's document. Options that Holdfast does not serve
are refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.integrations.ray_train import shipped_datasets
from holdfast.integrations.ray_train.errors import FunctionUnusable, NotServed

DEFAULT_NAME = "ray-train"
UNLIMITED = 1_000_000
"""Failures, for `max_failures=-1`."""
_CPUS = 1.0
"""CPUs per worker that Ray Train reserves for training without GPUs."""


@dataclass(frozen=True)
class ShippedFunction:
    """A training function, and the folder from which its module is imported; None: it is
    installed on the nodes."""

    reference: str
    folder: Path | None


@dataclass(frozen=True)
class NodeSize:
    """A node of the server's cluster."""

    cpus: float
    gpus: float


@dataclass(frozen=True)
class TrainerOptions:
    """What a `TorchTrainer` was given, in Ray's own types."""

    config: Mapping[str, Any] | None
    torch: Any
    scaling: Any
    run: Any
    datasets: Mapping[str, Any]


def job_document(
    function: ShippedFunction, options: TrainerOptions, nodes: Iterable[NodeSize]
) -> dict[str, Any]:
    """The spec of the job. Raises NotServed, FunctionUnusable."""
    _refuse_options(options)
    run = options.run
    resources = _resources(options.scaling, list(nodes))
    document: dict[str, Any] = {
        "name": run.name or DEFAULT_NAME,
        "ray_train": function.reference,
        "config": _plain_config(options.config or {}),
        "parallel": {"dp_shard": _size(options.scaling)},
        "resources": resources,
        "ray_run": {**_ray_run(run, options.torch), **_datasets(options.datasets)},
        "recovery": _recovery(run.failure_config),
        **_environment(run.worker_runtime_env),
    }
    if function.folder is not None:
        document["code"] = str(function.folder)
    return document


def workers_per_node(
    workers: int, strategy: str, cpus: float, gpus: float, nodes: list[NodeSize]
) -> int:
    """The number of workers of each node, the same on all nodes: for `PACK` as many as fit, for
    `SPREAD` as few as there are nodes for.

    Nodes count as empty. Without a known node it is 1.
    """
    if strategy == "STRICT_PACK":
        return workers
    if strategy in ("SPREAD", "STRICT_SPREAD"):
        counts: list[int] = [count for count in range(1, workers + 1) if workers % count == 0]
        enough = [count for count in counts if workers // count <= len(nodes)]
        return 1 if strategy == "STRICT_SPREAD" or not enough else enough[0]
    for count in range(workers, 1, -1):
        fitting = sum(count * cpus <= node.cpus and count * gpus <= node.gpus for node in nodes)
        if workers % count == 0 and fitting >= workers // count:
            return count
    return 1


def _refuse_options(options: TrainerOptions) -> None:
    scaling, run = options.scaling, options.run
    refused = {
        "TorchConfig(init_method)": (
            options.torch.init_method != "env",
            "leave it out: every attempt gets an address of its own",
        ),
        "ScalingConfig(num_workers=0)": (
            scaling.min_workers == 0,
            "use ray.train.torch.TorchTrainer for the local mode",
        ),
        "ScalingConfig(use_tpu)": (bool(scaling.use_tpu or scaling.topology), "use GPUs or CPUs"),
        "ScalingConfig(label_selector) as a list": (
            isinstance(scaling.label_selector, list),
            "name labels that all workers need, as a mapping",
        ),
        "RunConfig(callbacks)": (
            bool(run.callbacks),
            "follow the job's events: holdfast events, or the client",
        ),
        "RunConfig(storage_filesystem)": (
            run.storage_filesystem is not None,
            "name a folder that all nodes share in storage_path",
        ),
        f"RunConfig(storage_path={run.storage_path!r})": (
            "://" in str(run.storage_path),
            "name a folder that all nodes share; checkpoints in memory need none",
        ),
        "FailureConfig(relax_collectives_on_preemption)": (
            run.failure_config.relax_collectives_on_preemption,
            "leave it out: the newest checkpoint in memory is complete",
        ),
    }
    found = [f"{name}: {remedy}" for name, (given, remedy) in refused.items() if given]
    if found:
        raise NotServed("not served by Holdfast: " + "; ".join(found))


def _plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Raises FunctionUnusable for what JSON would change."""
    for key, value in config.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            same = False
        if not same or not isinstance(key, str):
            raise FunctionUnusable(
                f"train_loop_config[{key!r}] is a {type(value).__name__}, which JSON cannot "
                "express: pass numbers, texts, lists and mappings, and make the rest in the "
                "function"
            )
    return dict(config)


def _size(scaling: Any) -> int | str:
    return "auto" if scaling.elasticity_enabled else int(scaling.num_workers)


def _resources(scaling: Any, nodes: list[NodeSize]) -> dict[str, Any]:
    asked = dict(scaling.resources_per_worker or {})
    cpus = float(asked.pop("CPU", 0) or _CPUS)
    gpus = float(asked.pop("GPU", 1 if scaling.use_gpu else 0))
    if "memory" in asked:
        raise NotServed(
            "not served by Holdfast: resources_per_worker['memory']: leave it out, or choose "
            "nodes by label_selector"
        )
    found: dict[str, Any] = {
        "cpus_per_worker": cpus,
        "gpus_per_worker": gpus,
    }
    if scaling.elasticity_enabled:  # a worker per node, so that every number of them has a place
        found["workers_per_node"] = 1
        found["nodes"] = {"min": scaling.min_workers, "max": scaling.max_workers}
    else:
        found["workers_per_node"] = workers_per_node(
            scaling.num_workers, scaling.placement_strategy, cpus, gpus, nodes
        )
    if asked:
        found["custom"] = asked
    if scaling.label_selector:
        found["node_labels"] = dict(scaling.label_selector)
    if scaling.accelerator_type:
        found["accelerator_type"] = scaling.accelerator_type
    return found


def _ray_run(run: Any, torch: Any) -> dict[str, Any]:
    kept = run.checkpoint_config
    found = {
        "name": run.name,
        "storage_path": str(Path(run.storage_path).expanduser().absolute()),
        "num_to_keep": kept.num_to_keep,
        "score_attribute": kept.checkpoint_score_attribute,
        "score_order": kept.checkpoint_score_order,
        "timeout_s": torch.timeout_s,
    }
    return {**found, "backend": torch.backend}


def _datasets(datasets: Mapping[str, Any]) -> dict[str, Any]:
    return {"datasets": shipped_datasets.REFERENCE} if datasets else {}


def _recovery(failures: Any) -> dict[str, Any]:
    """The section `recovery`. For 0 failures, Ray Train's default without a restart, Holdfast's own
    limits hold."""
    found: dict[str, Any] = {}
    if failures.max_failures:
        most = failures.max_failures if failures.max_failures > 0 else UNLIMITED
        found = {"max_failures": most, "max_without_progress": most}
    if failures.max_preemption_failures >= 0:
        found["max_preemptions"] = failures.max_preemption_failures
    return found


def _environment(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    given = dict(runtime_env or {})
    variables = given.pop("env_vars", None)
    packages = given.pop("pip", None)
    if given or not isinstance(packages, list | None):
        names = ", ".join(sorted(given)) or "pip in this form"
        raise NotServed(
            f"not served by Holdfast: worker_runtime_env: {names}: use env_vars and a list of pip "
            "requirements"
        )
    found: dict[str, Any] = {"env": dict(variables)} if variables else {}
    return {**found, **({"runtime_env": {"pip": packages}} if packages else {})}
