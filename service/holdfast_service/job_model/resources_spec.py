"""The sections `resources` and `runtime_env` of a job spec: what the job's workers reserve, and on
which nodes; the Python packages that the job adds to its nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from holdfast_service.job_model.node_labels import (
    ACCELERATOR_PREFIX,
    NOT,
    LabelRule,
    rules_of,
)
from holdfast_service.job_model.node_range import NodeRange
from holdfast_workers.packages.requirements import fault_of
from holdfast_workers.spec import NonNegative, Positive, RankResources, Section, SpecFault

ACCELERATOR_AMOUNT = 0.001
"""Amount of the resource of a type of accelerators, which every program that uses them takes."""
DECIMALS = 4
"""Number of decimals of an amount of a resource in Ray."""
_OF_RAY = frozenset({"CPU", "GPU", "memory", "object_store_memory", "bundle"})
_OWN_LABELS = {
    "ray.io/node-id": "cordon the other nodes, or label the nodes that you mean",
    "ray.io/accelerator-type": "use accelerator_type",
}
_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
ResourceName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,62}$")]
NodeLabel = Annotated[str, Field(pattern=rf"^([A-Za-z0-9][A-Za-z0-9.-]{{0,252}}/)?{_NAME}$")]
_VALUE = re.compile(rf"!?{_NAME}")
MAX_VALUES = 16


def _values(value: object) -> list[str]:
    """The value as a list, with one error message for both forms; a union would report one for
    each."""
    given = [value] if isinstance(value, str) else value
    if isinstance(given, list | tuple) and 0 < len(given) <= MAX_VALUES:
        texts = [each for each in given if isinstance(each, str) and _VALUE.fullmatch(each)]
        if len(texts) == len(given):
            return texts
    raise PydanticCustomError(
        "label_values",
        "input should be a label's value, as VALUE or !VALUE, or a list of 1 to 16 of them, of "
        "letters, digits, dashes, dots and underscores",
    )


_VALUE_SCHEMA = {"type": "string", "pattern": f"^!?{_NAME}$"}
LabelValues = Annotated[
    list[str],
    PlainValidator(_values),
    WithJsonSchema(
        {
            "anyOf": [
                _VALUE_SCHEMA,
                {"type": "array", "items": _VALUE_SCHEMA, "minItems": 1, "maxItems": MAX_VALUES},
            ]
        }
    ),
]


class DomainsSpec(Section):
    """The labels of nodes that name their domains."""

    failure: NodeLabel | None = Field(
        default=None,
        description="The label whose value names what fails together, such as a rack: copies in "
        "memory lie in another. null: holdfast.io/domain, else topology.kubernetes.io/zone.",
    )
    fast: NodeLabel | None = Field(
        default=None,
        description="The label whose value names what is connected fastest, such as a switch: "
        "ranks that exchange most are placed in one. null: holdfast.io/fast-domain, else the "
        "failure domain.",
    )


class ResourcesSpec(RankResources):
    """The resources that the job's workers reserve on the cluster."""

    cpus_per_worker: Annotated[float, Field(gt=0)] = Field(
        default=0.5, description="CPUs that each worker reserves."
    )
    accelerator_type: ResourceName | None = Field(
        default=None,
        description="The type of accelerator that every node has, as Ray names it, such as H100.",
    )
    custom: Annotated[
        dict[ResourceName, Annotated[float, Field(gt=0, le=1e6)]], Field(max_length=16)
    ] = Field(
        default={},
        description="Amounts of Ray's custom resources that each worker reserves, by name.",
    )
    node_labels: Annotated[dict[NodeLabel, LabelValues], Field(max_length=16)] = Field(
        default={},
        description="Labels that every node of the job has, by key: a value, a list of which it "
        "has one, or `!value` (and lists of these), which it has not.",
    )
    domains: DomainsSpec = DomainsSpec()
    standby_nodes: NonNegative = Field(
        default=0, description="Additional nodes with warm workers, which replace failed nodes."
    )
    nodes: NodeRange | None = Field(
        default=None,
        description="The range of nodes of an elastic job: it trains on fewer while nodes are "
        "missing, and grows again. null: the mesh never changes.",
    )
    memory_per_worker_bytes: Positive | None = Field(
        default=None,
        description="Most memory that a rank may need for parameters, gradients, moments and "
        "activations, as modelled from the spec; a mesh that needs more is refused. null: not "
        "checked.",
    )

    @property
    def label_rules(self) -> tuple[LabelRule, ...]:
        return rules_of(self.node_labels)

    @property
    def node_custom(self) -> dict[str, float]:
        """Amounts of custom resources in the bundle of each node, that of the accelerator's type
        included."""
        return node_amounts(self.custom, self.accelerator_type, self.workers_per_node)

    @property
    def bundle(self) -> dict[str, float]:
        """All resources that the job reserves on each node, by Ray's names."""
        workers = self.workers_per_node
        gpus = {"GPU": workers * self.gpus_per_worker} if self.gpus_per_worker else {}
        return {"CPU": workers * self.cpus_per_worker, **gpus, **self.node_custom}


def node_amounts(
    custom: dict[str, float], accelerator_type: str | None, workers: int
) -> dict[str, float]:
    """The amounts on a node with so many workers."""
    found = {name: round(float(amount) * workers, DECIMALS) for name, amount in custom.items()}
    if accelerator_type is not None:
        found[f"{ACCELERATOR_PREFIX}{accelerator_type}"] = ACCELERATOR_AMOUNT
    return found


def node_request_faults(resources: ResourcesSpec) -> Iterator[SpecFault]:
    """The faults of what is asked of each node, whatever the cluster has."""
    gpus = resources.gpus_per_worker
    if gpus not in (0, 1):
        yield SpecFault(
            path="resources.gpus_per_worker",
            message=f"gpus_per_worker {gpus:g} is neither 0 nor 1: a rank computes on one device, "
            "and shares none; for more devices, use more ranks (parallel, workers_per_node)",
        )
    if resources.accelerator_type is not None and not gpus:
        yield SpecFault(
            path="resources.accelerator_type",
            message="accelerator_type without gpus_per_worker reserves no accelerator: set "
            "gpus_per_worker to 1, or choose nodes by node_labels",
            beside=("resources.gpus_per_worker",),
        )
    for name, amount in resources.custom.items():
        path = f"resources.custom.{name}"
        if name in _OF_RAY:
            message = f"{name} is not a custom resource: use cpus_per_worker or gpus_per_worker"
            yield SpecFault(path=path, message=message)
        if round(amount, DECIMALS) != amount:
            message = f"{amount:g} is finer than Ray divides resources: use steps of 0.0001"
            yield SpecFault(path=path, message=message)
    for key, values in resources.node_labels.items():
        path = f"resources.node_labels.{key}"
        if key in _OWN_LABELS:
            message = f"Holdfast places by {key} itself: {_OWN_LABELS[key]}"
            yield SpecFault(path=path, message=message)
        if len({value.startswith(NOT) for value in values}) > 1:
            message = "values with and without ! cannot be mixed: write either kind"
            yield SpecFault(path=path, message=message)


def _valid(requirement: str) -> str:
    if (fault := fault_of(requirement)) is not None:
        raise PydanticCustomError("requirement", "{fault}", {"fault": fault})
    return requirement


PipRequirement = Annotated[str, Field(max_length=1000), AfterValidator(_valid)]


class RuntimeEnvSpec(Section):
    """Packages that the job's ranks need beside those of every node. The job's files are `code`."""

    pip: list[PipRequirement] = Field(
        default_factory=list,
        max_length=1000,
        description="Python packages, such as `einops>=0.8`. Before the job takes nodes, one of "
        "them finds the exact versions and installs them; each node of the job then installs the "
        "same, once. The versions of what Holdfast, torch and Ray need do not change: a "
        "requirement that excludes them ends the job. Of a package at an address, the nodes "
        "install the file with the sha256 that the first one found, or that the address ends in "
        "(`#sha256=`); an address has no user and no password. The command line and the client "
        "accept a local requirements file here.",
    )
