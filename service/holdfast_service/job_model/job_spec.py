"""The job spec as users write it: the training run, and the settings of the control plane for it.

:func:`parse` is the only entry: a spec that it returns can be started. A document that it refuses
is refused with all faults and their paths, before anything is written or started. It does no I/O: a
caller that has looked for the spec's data between :func:`read` and :func:`check` adds its faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.capacity import Capacity
from holdfast_service.job_model.labels import MAX_LABELS, LabelName, LabelText, Priority
from holdfast_service.job_model.model_memory import group_faults, memory_faults, mesh_limits
from holdfast_service.job_model.node_range import (
    AutoSizes,
    order_in,
    range_faults,
    resolve,
    schedule_faults,
    scheduled_shapes,
    shapes_in,
    without_auto,
)
from holdfast_service.job_model.program_faults import MODULE_ATTRIBUTE, program_faults
from holdfast_service.job_model.resources_spec import (
    ResourcesSpec,
    RuntimeEnvSpec,
    node_request_faults,
)
from holdfast_service.job_model.spec_document import SpecReading, size_fault, validate_document
from holdfast_service.placement.mesh_choice import MeshLimits, MeshOrder
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.wording import plural
from holdfast_workers import spec as training_spec
from holdfast_workers.checkpoint.location_faults import data_location_faults, remote_tier_faults
from holdfast_workers.ipc import environment
from holdfast_workers.protocol.messages import InitPart
from holdfast_workers.spec import (
    BUILT_IN_RECIPES,
    BYTES,
    OF_PUBLISHED,
    DataSpec,
    ModelSpec,
    NonNegative,
    Section,
    SpecFault,
    TimeoutsSpec,
    TrainingSpec,
    amount_text,
    with_steps,
)

MAX_SPEC_BYTES = 2**16
"""Size of a resolved spec as JSON. As YAML, however it is written, it fits into a request too."""


class RecoverySpec(Section):
    """The limits and deadlines of recovery."""

    max_failures: NonNegative = Field(
        default=20,
        description="Failed attempts allowed within `window_s`, not counting preemptions and "
        "outages of the data.",
    )
    max_preemptions: NonNegative = Field(
        default=100, description="Preempted attempts allowed within `window_s`."
    )
    max_without_progress: NonNegative = Field(
        default=5, description="Failed attempts in a row allowed without a new step."
    )
    window_s: Annotated[float, Field(gt=0)] = Field(
        default=3600, description="Length of the window in which failed attempts are counted."
    )
    wait_for_replacement_s: Annotated[float, Field(ge=0)] = Field(
        default=60,
        description="Longest wait for free nodes for all ranks; see `on_shortage`.",
    )
    on_shortage: Literal["queue", "fail"] = Field(
        default="queue",
        description="After that wait: queue the job again, with its state saved, or let it fail.",
    )
    grow_after_s: Annotated[float, Field(ge=0)] = Field(
        default=30,
        description="An elastic job grows when nodes for a larger mesh have been ready this long. "
        "Each resize within `window_s` doubles it.",
    )
    grow_min_gain: Annotated[float, Field(ge=-1)] = Field(
        default=0.05,
        description="Least gain in tokens per second for which an elastic job grows: 0.05 is 5%. "
        "Below 0: it grows whenever there is room.",
    )
    assemble_wait_s: Annotated[float, Field(ge=0)] = Field(
        default=30,
        description="How long an elastic job waits at its start for the nodes of its largest mesh, "
        "once a smaller one could start.",
    )
    heartbeat_timeout_s: Annotated[float, Field(ge=0.2, le=600)] = Field(
        default=2,
        description="A supervisor declares an agent lost after this long without a message.",
    )
    lease_s: Annotated[float, Field(ge=0, le=86400)] = Field(
        default=10,
        description="How long ranks may continue with steps after their supervisor's process has "
        "ended, until a new supervisor reaches them; 0: without limit, and unreachable ranks are "
        "then replaced only with proof that they have ended.",
    )


class InitFromSpec(Section):
    """The checkpoint that a job starts from, instead of a random state from its seed."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    source: str = Field(
        alias="from",
        min_length=1,
        max_length=1000,
        description="`JOB` or `JOB/STEP`, with a job's id or name (of several the newest); or "
        "the URI of a checkpoint's folder; `dcp:/path` for a checkpoint that "
        "torch.distributed.checkpoint wrote.",
    )
    what: InitPart | None = Field(
        default=None,
        description="The part of the checkpoint to load; null: everything, if the other run has "
        "the same recipe and model, else the model.",
    )


def _expand_short_form(value: object) -> object:
    return {"from": value} if isinstance(value, str) else value


InitFrom = Annotated[
    InitFromSpec, BeforeValidator(_expand_short_form, json_schema_input_type=str | InitFromSpec)
]


VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
VariableText = Annotated[str, Field(max_length=4096)]
_ENV_BYTES = 32 * 1024
"""Longest `env` of a job, names and values together."""


class JobSpec(TrainingSpec):
    """The whole document; its sections are top-level keys, as in the examples."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="Name of the job; several jobs may have the same name.",
    )
    labels: dict[LabelName, LabelText] = Field(
        default_factory=dict,
        max_length=MAX_LABELS,
        description="Labels of your choice; lists show the label `owner` and can filter by it.",
    )
    priority: Priority = Field(
        default=0,
        description="Of the jobs in the queue, those with the highest priority start first, and of "
        "those the oldest. Running jobs are not stopped for others.",
    )
    code: str | None = Field(
        default=None,
        pattern=r"^sha256:[0-9a-f]{64}$",
        description="The code folder from which `function` or a recipe of your own is imported, "
        "and in which a program is started, by the id that `POST /api/v1/code` returned; the "
        "command line and the Python client accept a local path here and upload it.",
    )
    init_from: InitFrom | None = Field(
        default=None,
        description="The checkpoint to start from; a string is short for the key `from`.",
    )
    env: dict[VariableName, VariableText] = Field(
        default_factory=dict,
        max_length=128,
        description="Environment variables of the ranks' processes. Not for secrets: everybody who "
        "can read the job can read them.",
    )
    runtime_env: RuntimeEnvSpec = RuntimeEnvSpec()
    resources: ResourcesSpec = ResourcesSpec()
    recovery: RecoverySpec = RecoverySpec()
    timeouts: TimeoutsSpec = TimeoutsSpec()

    def training(self) -> TrainingSpec:
        """The part of the spec that the workers need."""
        return self.part(TrainingSpec)

    @property
    def training_nodes(self) -> int:
        return ceil(self.parallel.world_size / self.resources.workers_per_node)

    @property
    def nodes(self) -> int:
        """Nodes that the job reserves, including standby nodes."""
        return self.training_nodes + self.resources.standby_nodes

    @property
    def needed_nodes(self) -> int:
        """Nodes without which the job does not start."""
        if self.resources.nodes is None:
            return self.nodes
        scheduled = [shape.nodes for _, shape in self.schedule]
        return max(scheduled) if scheduled else min(shape.nodes for shape in self.shapes)

    @property
    def shapes(self) -> tuple[WorldShape, ...]:
        """The shapes that the job's world may have, best first."""
        per_node = self.resources.workers_per_node
        if self.resources.nodes is None:
            return (WorldShape.of(self.parallel.mesh, per_node),)
        return shapes_in(self.resources.nodes, self.parallel, self.mesh_limits)

    @property
    def mesh_limits(self) -> MeshLimits:
        """The limits of every mesh of the job."""
        resources = self.resources
        return mesh_limits(self, resources.workers_per_node, resources.memory_per_worker_bytes)

    def mesh_order(self, asked: tuple[int, int] | None = None) -> MeshOrder | None:
        """The meshes of an elastic job in order, with reasons; None for a job with one mesh.
        `asked`: the range that its author named, which may be wider than that of the meshes."""
        nodes = self.resources.nodes
        if nodes is None:
            return None
        if asked is not None:
            nodes = nodes.model_copy(update={"min": asked[0], "max": asked[1]})
        return order_in(nodes, self.parallel, self.mesh_limits)

    @property
    def schedule(self) -> tuple[tuple[int, WorldShape], ...]:
        """(step, shape of the world after it), in order; empty: the shape follows the nodes."""
        nodes = self.resources.nodes
        return scheduled_shapes(nodes, self.shapes) if nodes is not None else ()

    @property
    def node_cpus(self) -> float:
        """CPUs in the bundle of each node."""
        return self.resources.workers_per_node * self.resources.cpus_per_worker

    @property
    def node_gpus(self) -> float:
        return self.resources.workers_per_node * self.resources.gpus_per_worker


def parse(document: Mapping[str, Any], capacity: Capacity | None) -> JobSpec:
    """:func:`read` and :func:`check` together."""
    return check(read(document), capacity)


def read(document: Mapping[str, Any]) -> SpecReading[JobSpec]:
    """The document's form: a spec, whose invalid fields have their defaults, and the faults."""
    auto = without_auto(document) if isinstance(document, Mapping) else AutoSizes(document)
    reading = validate_document(JobSpec, auto.document, stand_ins=_STAND_INS)
    if reading.spec is None:
        return reading
    spec = reading.spec.model_copy(
        update={"train": with_steps(reading.spec), "data": _with_tokenizer(reading.spec)}
    )
    reading = replace(reading, spec=spec)
    resolved = resolve(auto, spec.parallel, spec.resources.nodes, spec.mesh_limits)
    if resolved.fault is None:
        resources = spec.resources.model_copy(update={"nodes": resolved.nodes})
        update = {"parallel": resolved.parallel, "resources": resources}
        # The mesh cannot be judged by defaults that replaced invalid numbers.
        elastic = spec.resources.nodes is not None
        by_default = "resources.workers_per_node" in reading.defaulted
        unknown = ("resources.nodes",) if reading.faults and (elastic or by_default) else ()
        defaulted = (*reading.defaulted, *unknown)
        return replace(reading, spec=spec.model_copy(update=update), defaulted=defaulted)
    is_doubtful = resolved.is_of_numbers and bool(reading.faults)
    return replace(
        reading,
        faults=(*(() if is_doubtful else (resolved.fault,)), *reading.faults),
        defaulted=(*reading.defaulted, "parallel", *_SIZED_BY_MESH),
    )


def check(
    reading: SpecReading[JobSpec], capacity: Capacity | None, found: Iterable[SpecFault] = ()
) -> JobSpec:
    """The spec that was read. Raises :class:`InvalidSpec` with all faults, those `found` elsewhere
    included.

    `capacity` None: the cluster does not answer at present. A spec that is too large for it is then
    accepted, and waits in the queue with a named reason.
    """
    spec, faults = reading.spec, list(reading.faults)
    if spec is not None:
        relations = [
            *training_spec.find_faults(spec),
            *_recipe_faults(spec),
            *program_faults(spec, spec.code),
            *found,
            *([] if spec.has_own_model else data_location_faults(spec.data)),
            *remote_tier_faults(spec.checkpoint.remote),
            *_env_faults(spec),
            *_resource_faults(spec),
            *_range_faults(spec),
            *memory_faults(spec.mesh_limits, spec.parallel),
            *group_faults(spec),
            *_lease_faults(spec),
            *(_capacity_faults(spec, capacity) if capacity else ()),
            *_size_faults(spec),
        ]
        # A relation with a default that replaced an invalid field is not a fault of the user.
        faults += [fault for fault in relations if not _depends_on(fault, reading.defaulted)]
    if spec is None or faults:
        raise InvalidSpec.of(faults)
    return spec


def _with_tokenizer(spec: JobSpec) -> DataSpec:
    """The section `data`, with the tokenizer of the published model unless another one is named:
    `bytes`, the default, is none of a published model."""
    data, folder = spec.data, spec.model.source
    if folder is None or not folder.startswith("/") or not data.sources:
        return data
    is_named = data.tokenizer != BYTES
    return data if is_named else data.model_copy(update={"tokenizer": folder})


def with_data(spec: JobSpec, data: DataSpec) -> JobSpec:
    """The spec with the token sets of its sources, and with the steps that its epochs come to."""
    own = {"steps": None} if spec.train.epochs is not None else {}
    train = spec.train.model_copy(update=own)
    known = spec.model_copy(update={"data": data, "train": train})
    return known.model_copy(update={"train": with_steps(known)})


def prepared_faults(spec: JobSpec) -> list[SpecFault]:
    """The faults of an accepted spec whose `data.prepared`, or sizes of a published model, have
    become known since: of its length, its mesh, and the memory of its ranks. Those of `init_from`:
    `InitSources.check_again`."""
    return [
        *training_spec.find_faults(spec),
        *_range_faults(spec),
        *memory_faults(spec.mesh_limits, spec.parallel),
        *group_faults(spec),
    ]


_STAND_INS = {"name": "unnamed"}
_SIZED_BY_MESH = (
    "resources.nodes",
    "resources.workers_per_node",
    "resources.memory_per_worker_bytes",
)
"""Fields that cannot be judged without the size of the mesh."""


def _depends_on(fault: SpecFault, paths: Iterable[str]) -> bool:
    """Whether `fault` depends on a field (or a section) at one of `paths`."""
    ours = [f"{path}." for path in (fault.path, *fault.beside)]
    # A field of an invalid section, or a section with an invalid field.
    theirs = [f"{path}." for path in paths]
    return any(own.startswith(path) or path.startswith(own) for own in ours for path in theirs)


def _recipe_faults(spec: JobSpec) -> list[SpecFault]:
    references = {"function": spec.function, "evaluate.function": spec.evaluate.function}
    for path, reference in references.items():
        if reference is not None and not MODULE_ATTRIBUTE.fullmatch(reference):
            message = f"{reference!r} is not a function reference: write package.module:name"
            return [SpecFault(path=path, message=message)]
    if spec.recipe in BUILT_IN_RECIPES or MODULE_ATTRIBUTE.fullmatch(spec.recipe):
        return []
    known = ", ".join(BUILT_IN_RECIPES)
    return [
        SpecFault(
            path="recipe",
            message=f"there is no recipe {spec.recipe!r}: use one of {known}, "
            "or your own recipe as package.module:attribute",
        )
    ]


def _env_faults(spec: JobSpec) -> list[SpecFault]:
    found = [
        SpecFault(path=f"env.{name}", message=f"{name} is set by Holdfast itself: remove it")
        for name in spec.env
        if environment.is_reserved(name)
    ]
    length = sum(len(f"{name}={value}".encode()) for name, value in spec.env.items())
    if length > _ENV_BYTES:
        message = f"it has {length:,} bytes, {_ENV_BYTES:,} are allowed: put the rest into a file"
        found.append(SpecFault(path="env", message=message))
    return found


def _size_faults(spec: JobSpec) -> list[SpecFault]:
    """A resolved spec must be accepted again, as JSON and as YAML; also with what the server adds
    once its sources are prepared, so that this does not count."""
    data, train, model = spec.data, spec.train, spec.model
    validation = data.validation and data.validation.model_copy(update={"prepared": None})
    data = data.model_copy(update={"prepared": (), "special_tokens": {}, "validation": validation})
    if amount_text(train):
        train = train.model_copy(update={"steps": None})
    if model.published is not None:
        model = ModelSpec.model_validate(model.model_dump(exclude={"published", *OF_PUBLISHED}))
    own = spec.model_copy(update={"data": data, "train": train, "model": model})
    nbytes = len(own.model_dump_json())
    fault = size_fault(own.model_dump(mode="json"))
    if nbytes > MAX_SPEC_BYTES:
        fault = f"{nbytes:,} bytes, and {MAX_SPEC_BYTES:,} are allowed"
    if fault is None:
        return []
    message = f"the spec with its defaults has {fault}: keep large settings in a file of the code"
    return [SpecFault(path="", message=message)]


def _resource_faults(spec: JobSpec) -> list[SpecFault]:
    found: list[SpecFault] = []
    world, per_node = spec.parallel.world_size, spec.resources.workers_per_node
    if per_node > world:
        found.append(
            SpecFault(
                path="resources.workers_per_node",
                message=f"workers_per_node {per_node} exceeds the world of {world} "
                f"({spec.parallel.product})",
                beside=("parallel",),
            )
        )
    elif world % per_node:
        found.append(
            SpecFault(
                path="resources.workers_per_node",
                message=f"the world of {world} ({spec.parallel.product}) is not a multiple of "
                f"workers_per_node {per_node}",
                beside=("parallel",),
            )
        )
    return [*found, *node_request_faults(spec.resources)]


def _range_faults(spec: JobSpec) -> list[SpecFault]:
    nodes = spec.resources.nodes
    if nodes is None:
        return []
    found = range_faults(nodes, spec.parallel, spec.mesh_limits)
    if found or not nodes.schedule:
        return found
    if spec.brings_program:
        message = "a program's loop cannot be stopped at a step: remove the schedule"
        return [SpecFault(path="resources.nodes.schedule", message=message)]
    if not spec.checkpoint.first_intervals[0]:
        message = "a schedule of meshes needs checkpoints in memory: set checkpoint.memory.every"
        return [SpecFault(path="resources.nodes.schedule", message=message)]
    return [*schedule_faults(nodes, spec.shapes, spec.train.steps)]


def _lease_faults(spec: JobSpec) -> list[SpecFault]:
    """Find a lease that ends before silence counts: after a supervisor's end, ranks must not stop
    sooner than after its silence."""
    lease_s, timeout_s = spec.recovery.lease_s, spec.recovery.heartbeat_timeout_s
    if not 0 < lease_s < timeout_s:
        return []
    return [
        SpecFault(
            path="recovery.lease_s",
            message=f"lease_s {_g(lease_s)} is shorter than heartbeat_timeout_s {_g(timeout_s)}: "
            "ranks would stop sooner after their supervisor's end than after its silence; make it "
            "at least as long, or 0 for no lease",
            beside=("recovery.heartbeat_timeout_s",),
        )
    ]


_NODES_NEEDED = (
    "parallel",
    "resources.nodes",
    "resources.workers_per_node",
    "resources.cpus_per_worker",
    "resources.gpus_per_worker",
    "resources.standby_nodes",
)


def _capacity_faults(spec: JobSpec, capacity: Capacity) -> list[SpecFault]:
    """The faults of a spec that is too large for a cluster that cannot grow."""
    if capacity.can_grow or capacity.unlimited:
        return []
    cpus, gpus = spec.node_cpus, spec.node_gpus
    workers = plural(spec.resources.workers_per_node, "worker")
    found: list[SpecFault] = []
    if not any(node.cpus >= cpus for node in capacity.nodes):
        largest = max((node.cpus for node in capacity.nodes), default=0)
        found.append(
            SpecFault(
                path="resources.cpus_per_worker",
                message=f"no node has {plural(cpus, 'CPU')} for {workers}: "
                f"the largest has {_g(largest)} (workers_per_node, cpus_per_worker)",
                beside=("resources.workers_per_node",),
            )
        )
    if gpus and not any(node.gpus >= gpus for node in capacity.nodes):
        largest = max((node.gpus for node in capacity.nodes), default=0)
        found.append(
            SpecFault(
                path="resources.gpus_per_worker",
                message=f"no node has {plural(gpus, 'GPU')} for {workers}: "
                f"the largest has {_g(largest)} (workers_per_node, gpus_per_worker)",
                beside=("resources.workers_per_node",),
            )
        )
    if found:
        return found
    fitting = sum(node.cpus >= cpus and node.gpus >= gpus for node in capacity.nodes)
    if fitting >= spec.needed_nodes:
        return []
    standby = spec.resources.standby_nodes
    return [
        SpecFault(
            # If the training nodes fit without the standbys, fewer standbys help.
            path="resources.standby_nodes" if fitting >= spec.training_nodes else "parallel",
            message=f"needs {plural(spec.nodes, 'node')} of {plural(cpus, 'CPU')} and "
            f"{plural(gpus, 'GPU')} ({spec.training_nodes} that train, standby_nodes {standby}), "
            f"and the cluster, which cannot grow, has {fitting}",
            beside=_NODES_NEEDED,
        )
    ]


def _g(number: float) -> str:
    return f"{number:g}"
