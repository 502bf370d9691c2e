"""A job spec as a user writes it: a training run, and what only the control plane knows of it.

:func:`parse` is the one door: what it returns can be started, and what it refuses it refuses
with every fault at its path at once, before anything has been written or started.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from math import ceil
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from holdfast_service.reports import Capacity
from holdfast_service.spec_document import validated
from holdfast_workers import spec as training_spec
from holdfast_workers.spec import (
    BUILT_IN_RECIPES,
    Fault,
    NonNegative,
    Positive,
    Section,
    TrainingSpec,
)

_BUNDLED_SOURCES = ("python-stdlib",)
_MODULE_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class ResourcesSpec(Section):
    cpus_per_worker: Annotated[float, Field(gt=0)] = 0.5
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0
    workers_per_node: Positive = 1
    standby_nodes: NonNegative = Field(
        default=0, description="nodes' worth of warm workers beside those that train"
    )


class RecoverySpec(Section):
    max_failures: NonNegative = Field(default=20, description="incidents allowed per window")
    window_s: Annotated[float, Field(gt=0)] = 3600
    wait_for_replacement_s: Annotated[float, Field(ge=0)] = 60


class JobSpec(TrainingSpec):
    """The whole document, sections flat, as in the examples."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    resources: ResourcesSpec = ResourcesSpec()
    recovery: RecoverySpec = RecoverySpec()

    def training(self) -> TrainingSpec:
        """The part that the data plane needs."""
        return TrainingSpec(**{key: getattr(self, key) for key in TrainingSpec.model_fields})

    @property
    def training_nodes(self) -> int:
        return ceil(self.parallel.world_size / self.resources.workers_per_node)

    @property
    def nodes(self) -> int:
        """Nodes it wants to hold at the same time, standbys included."""
        return self.training_nodes + self.resources.standby_nodes

    @property
    def node_cpus(self) -> float:
        """CPUs of one node's bundle."""
        return self.resources.workers_per_node * self.resources.cpus_per_worker

    @property
    def node_gpus(self) -> float:
        return self.resources.workers_per_node * self.resources.gpus_per_worker


class InvalidSpec(Exception):
    """The document cannot be run as it stands; `faults` says everything that is wrong."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(f"{fault.path or 'spec'}: {fault.message}" for fault in faults))
        self.faults = faults


def parse(
    document: Mapping[str, Any], capacity: Capacity | None, *, check_paths: bool = True
) -> JobSpec:
    """The spec that `document` describes, or :class:`InvalidSpec` with all its faults.

    `capacity` None means that the cluster cannot be asked at present: a spec too large for it is
    then accepted, and waits in the queue with a named reason.
    """
    reading = validated(JobSpec, document, stand_ins={"name": "unnamed"})
    spec, faults = reading.spec, list(reading.faults)
    if spec is not None:
        relations = [
            *training_spec.faults(spec),
            *_recipe_faults(spec),
            *(_source_faults(spec) if check_paths else ()),
            *_checkpoint_faults(spec),
            *_resource_faults(spec),
            *(_capacity_faults(spec, capacity) if capacity else ()),
        ]
        # What would follow from a default that the user did not choose is no fault of theirs.
        faults += [fault for fault in relations if not _reads(fault, reading.defaulted)]
    if spec is None or faults:
        raise InvalidSpec(faults)
    return spec


def _reads(fault: Fault, paths: Iterable[str]) -> bool:
    """Whether `fault` follows from a field (or a section) at one of `paths`.

    A fault between fields names all of them in its message.
    """
    for path in paths:
        if fault.path == path or fault.path.startswith(f"{path}."):
            return True
        if re.search(rf"\b{re.escape(path.rpartition('.')[2])}\b", fault.message):
            return True
    return False


def _recipe_faults(spec: JobSpec) -> list[Fault]:
    if spec.recipe in BUILT_IN_RECIPES or _MODULE_ATTRIBUTE.fullmatch(spec.recipe):
        return []
    known = ", ".join(BUILT_IN_RECIPES)
    return [
        Fault(
            path="recipe",
            message=f"there is no recipe {spec.recipe!r}: use one of {known}, "
            "or a program of yours as package.module:attribute",
        )
    ]


def _source_faults(spec: JobSpec) -> list[Fault]:
    source = spec.data.source
    if source in _BUNDLED_SOURCES:
        return []
    # Path.glob takes relative patterns only, and a user writes absolute ones.
    if source and (Path(source).exists() or any(glob.iglob(source, recursive=True))):  # noqa: PTH207
        return []
    return [
        Fault(
            path="data.source",
            message=f"{source!r} does not exist: give the path or glob of text files that every "
            f"node can read, or {_BUNDLED_SOURCES[0]!r}",
        )
    ]


def _checkpoint_faults(spec: JobSpec) -> list[Fault]:
    uri = spec.checkpoint.remote.uri
    if uri is None:
        return []
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        problem = f"scheme {parts.scheme!r} is not supported: use a path or file://"
    elif parts.netloc not in ("", "localhost"):
        problem = f"host {parts.netloc!r} is not supported: write file:///absolute/path"
    elif not parts.path.startswith("/"):
        problem = f"{uri!r} must be absolute: it is read on every node"
    else:
        return []
    return [Fault(path="checkpoint.remote.uri", message=problem)]


def _resource_faults(spec: JobSpec) -> list[Fault]:
    found: list[Fault] = []
    world, per_node = spec.parallel.world_size, spec.resources.workers_per_node
    gpus = spec.resources.gpus_per_worker
    if per_node > world:
        found.append(
            Fault(
                path="resources.workers_per_node",
                message=f"workers_per_node {per_node} exceeds the world of {world} "
                f"(dp_shard × tp = {spec.parallel.dp_shard} × {spec.parallel.tp})",
            )
        )
    elif world % per_node:
        found.append(
            Fault(
                path="resources.workers_per_node",
                message=f"the world of {world} (dp_shard × tp = {spec.parallel.dp_shard} × "
                f"{spec.parallel.tp}) is not a multiple of workers_per_node {per_node}",
            )
        )
    if gpus > 1 and gpus != int(gpus):
        found.append(
            Fault(
                path="resources.gpus_per_worker",
                message=f"gpus_per_worker {gpus} must be whole above 1",
            )
        )
    return found


def _capacity_faults(spec: JobSpec, capacity: Capacity) -> list[Fault]:
    """What a cluster that cannot grow could never hold."""
    if capacity.can_grow:
        return []
    cpus, gpus = spec.node_cpus, spec.node_gpus
    found: list[Fault] = []
    if not any(node.cpus >= cpus for node in capacity.nodes):
        most = max((node.cpus for node in capacity.nodes), default=0)
        found.append(
            Fault(
                path="resources.cpus_per_worker",
                message=f"{spec.resources.workers_per_node} workers of {_g(cpus)} CPUs together "
                f"fit on no node: the largest has {_g(most)} (workers_per_node, cpus_per_worker)",
            )
        )
    if gpus and not any(node.gpus >= gpus for node in capacity.nodes):
        most = max((node.gpus for node in capacity.nodes), default=0)
        found.append(
            Fault(
                path="resources.gpus_per_worker",
                message=f"{spec.resources.workers_per_node} workers of {_g(gpus)} GPUs together "
                f"fit on no node: the largest has {_g(most)} (workers_per_node, gpus_per_worker)",
            )
        )
    if found:
        return found
    able = sum(node.cpus >= cpus and node.gpus >= gpus for node in capacity.nodes)
    if able >= spec.nodes:
        return []
    standby = spec.resources.standby_nodes
    return [
        Fault(
            # The part that alone is too much; if only both together are, fewer standbys help.
            path="resources.standby_nodes" if able >= spec.training_nodes else "parallel",
            message=f"needs {spec.nodes} nodes of {_g(cpus)} CPUs and {_g(gpus)} GPUs "
            f"({spec.training_nodes} that train, standby_nodes {standby}), and the cluster, "
            f"which cannot grow, has {able}",
        )
    ]


def _g(number: float) -> str:
    return f"{number:g}"
