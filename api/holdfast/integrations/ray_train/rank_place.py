"""The environment of a rank states its place, and how the function is to be called."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from holdfast.integrations.ray_train.errors import FunctionUnusable
from holdfast_workers.spec import RayRunSpec

CONFIG_VARIABLE = "HOLDFAST_TRAIN_CONFIG"
"""The function's configuration, as JSON."""
RUN_VARIABLE = "HOLDFAST_TRAIN_RUN"
"""The section `ray_run` of the spec, as JSON."""
CLUSTER_VARIABLE = "HOLDFAST_TRAIN_CLUSTER"
"""The Ray cluster of the node, as JSON; set for jobs with Ray datasets."""


@dataclass(frozen=True)
class WorldPlace:
    """A rank's place in the world, as torchrun's variables name it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int

    @property
    def has_other_nodes(self) -> bool:
        """Whether ranks run on other nodes too."""
        return self.world_size > self.local_world_size

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> WorldPlace:
        """Raises FunctionUnusable."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in variables]
        if missing:
            raise FunctionUnusable(
                f"{', '.join(missing)} is not set: this program is started by a job with "
                "`ray_train`, or by torchrun"
            )
        rank, world_size, local_rank, local_world_size = (int(variables[name]) for name in names)
        node_rank = int(variables.get("GROUP_RANK", rank // local_world_size))
        return cls(rank, world_size, local_rank, local_world_size, node_rank)


@dataclass(frozen=True)
class ClusterPlace:
    """The Ray cluster of a rank's node."""

    address: str
    """Address of the cluster's control service."""
    host: str
    """The node's own address."""
    code: str
    """The folder of the job's code package; "": there is none."""


def config_of(variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The function's configuration. Raises FunctionUnusable."""
    return _mapping(variables, CONFIG_VARIABLE)


def run_of(variables: Mapping[str, str] = os.environ) -> RayRunSpec:
    """The section `ray_run` of the job's spec. Raises FunctionUnusable."""
    try:
        return RayRunSpec.model_validate(_mapping(variables, RUN_VARIABLE))
    except ValidationError as error:
        raise FunctionUnusable(f"{RUN_VARIABLE} cannot be used: {error}") from error


def cluster_of(variables: Mapping[str, str] = os.environ) -> ClusterPlace:
    """The cluster with which the datasets are read. Raises FunctionUnusable."""
    found = _mapping(variables, CLUSTER_VARIABLE)
    if not found:
        raise FunctionUnusable(
            f"{CLUSTER_VARIABLE} is not set, by which a rank finds the Ray cluster of its node: "
            "Ray datasets are for jobs of a Holdfast server"
        )
    return ClusterPlace(found["address"], found["host"], found.get("code", ""))


def _mapping(variables: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        found = json.loads(variables.get(name) or "{}")
    except ValueError as error:
        raise FunctionUnusable(f"{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise FunctionUnusable(f"{name} is not a mapping: {type(found).__name__}")
    return found
