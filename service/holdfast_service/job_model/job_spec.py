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

from pydantic import BeforeValidator, ConfigDict, Field

from holdfast_service.job_model.spec_document import validated
from holdfast_service.job_model.supervisor_protocol import Capacity
from holdfast_workers import spec as training_spec
from holdfast_workers.checkpoint.storage import uri_fault
from holdfast_workers.protocol.messages import InitPart
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
    max_failures: NonNegative = Field(
        default=20, description="attempts that may fail per window, preemptions apart"
    )
    max_preemptions: NonNegative = Field(default=100, description="the same of preemptions")
    max_without_progress: NonNegative = Field(
        default=5, description="attempts in a row that may fail without a new step"
    )
    window_s: Annotated[float, Field(gt=0)] = 3600
    wait_for_replacement_s: Annotated[float, Field(ge=0)] = 60
    heartbeat_timeout_s: Annotated[float, Field(ge=0.2, le=600)] = Field(
        default=2, description="an agent silent for so long is lost to its supervisor"
    )
    lease_s: Annotated[float, Field(ge=0, le=86400)] = Field(
        default=10,
        description="how long ranks may step on after their supervisor's process has ended, until "
        "another hears them; 0: for ever, and ranks that nobody can reach are then never replaced "
        "without proof",
    )


class InitFromSpec(Section):
    """The state that a job begins with, instead of its seed's."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    source: str = Field(
        alias="from",
        min_length=1,
        max_length=1000,
        description="`JOB` or `JOB/STEP`, a job by its id, or the newest of a name; or the URI of "
        "a checkpoint's folder; `dcp:/path` for one that stock torch wrote",
    )
    what: InitPart | None = Field(
        default=None,
        description="null: everything, if the other run has the same recipe and model; else model",
    )


def _short_form(given: object) -> object:
    return {"from": given} if isinstance(given, str) else given


InitFrom = Annotated[
    InitFromSpec, BeforeValidator(_short_form, json_schema_input_type=str | InitFromSpec)
]


LabelName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9._-]{0,31}$")]
LabelText = Annotated[str, Field(max_length=64)]


class JobSpec(TrainingSpec):
    """The whole document, sections flat, as in the examples."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    labels: dict[LabelName, LabelText] = Field(
        default_factory=dict,
        max_length=16,
        description="words of your own; lists show `owner` and can be asked for it",
    )
    code: str | None = Field(
        default=None,
        pattern=r"^sha256:[0-9a-f]{64}$",
        description="the folder that `function` or a recipe of one's own is imported from, as "
        "`POST /api/v1/code` named it; the command line and the client take a path and send it",
    )
    init_from: InitFrom | None = Field(
        default=None, description="another run's checkpoint; short for its key `from`"
    )
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
            *_lease_faults(spec),
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
    if spec.function is not None:
        return _function_faults(spec)
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


def _function_faults(spec: JobSpec) -> list[Fault]:
    found = []
    if not _MODULE_ATTRIBUTE.fullmatch(str(spec.function)):
        message = f"{spec.function!r} is no function: write package.module:name"
        found.append(Fault(path="function", message=message))
    if spec.recipe != "pretrain":
        message = "a job has a recipe or a function: leave one of them out"
        found.append(Fault(path="recipe", message=message))
    return found


def _source_faults(spec: JobSpec) -> list[Fault]:
    if spec.function is not None:
        return []
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
    remote = spec.checkpoint.remote
    found: list[Fault] = []
    problem = uri_fault(remote.uri) if remote.uri is not None else None
    if problem is not None:
        message = f"{remote.uri!r} is no storage: {problem}"
        found.append(Fault(path="checkpoint.remote.uri", message=message))
    if not (remote.uri or "").startswith("s3://"):
        found += [
            Fault(
                path=f"checkpoint.remote.{name}",
                message=f"{name} says how to reach a bucket: give a uri s3://bucket/prefix with it",
            )
            for name in ("endpoint", "region", "secret")
            if getattr(remote, name) is not None
        ]
    if remote.endpoint is not None:
        parts = urlsplit(remote.endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            message = f"{remote.endpoint!r} is no URL: write https://host or http://host:port"
            found.append(Fault(path="checkpoint.remote.endpoint", message=message))
        elif parts.username is not None:
            message = "an endpoint bears no credentials: name a secret"
            found.append(Fault(path="checkpoint.remote.endpoint", message=message))
    return found


def _resource_faults(spec: JobSpec) -> list[Fault]:
    found: list[Fault] = []
    world, per_node = spec.parallel.world_size, spec.resources.workers_per_node
    gpus = spec.resources.gpus_per_worker
    if per_node > world:
        found.append(
            Fault(
                path="resources.workers_per_node",
                message=f"workers_per_node {per_node} exceeds the world of {world} "
                f"({spec.parallel.words})",
            )
        )
    elif world % per_node:
        found.append(
            Fault(
                path="resources.workers_per_node",
                message=f"the world of {world} ({spec.parallel.words}) is not a multiple of "
                f"workers_per_node {per_node}",
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


def _lease_faults(spec: JobSpec) -> list[Fault]:
    """The end of a supervisor must not cost more than its silence would."""
    lease_s, timeout_s = spec.recovery.lease_s, spec.recovery.heartbeat_timeout_s
    if not 0 < lease_s < timeout_s:
        return []
    return [
        Fault(
            path="recovery.lease_s",
            message=f"lease_s {_g(lease_s)} is shorter than heartbeat_timeout_s {_g(timeout_s)}: "
            "ranks would hold sooner after their supervisor's end than after its silence; make it "
            "at least as long, or 0 for no lease",
        )
    ]


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
