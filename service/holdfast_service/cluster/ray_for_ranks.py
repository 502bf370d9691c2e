"""How the ranks of a job with Ray datasets reach the Ray cluster of their node.

Pure. The ranks of all other jobs get nothing of it. Of the token they get the path of its file,
never the token itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from holdfast_workers.ipc import environment
from holdfast_workers.spec import TrainingSpec

CLUSTER_VARIABLE = "HOLDFAST_TRAIN_CLUSTER"
"""A `NodesCluster` as JSON, for the Ray Train plug-in."""


@dataclass(frozen=True)
class NodesCluster:
    """The Ray cluster, as one of its nodes sees it."""

    address: str
    """Address of the cluster's control service."""
    host: str
    """The address of the node."""
    code: str
    """The node's folder of the job's code package; "": there is none."""


def uses_ray(training: TrainingSpec) -> bool:
    """Whether the ranks of this training spec read Ray datasets."""
    return training.ray_train is not None and training.ray_run.datasets is not None


def variables_for_ranks(cluster: NodesCluster, node: Mapping[str, str]) -> dict[str, str]:
    """The variables by which ranks reach the cluster. `node`: the environment of their agent."""
    return {CLUSTER_VARIABLE: json.dumps(asdict(cluster)), **environment.for_ray_clients(node)}
