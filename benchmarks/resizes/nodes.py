"""Joins nodes to an embedded cluster."""

from __future__ import annotations

from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.embedded_cluster.local_cluster import LocalCluster, LocalClusterError

TRIES = 3


def add(cluster: LocalCluster) -> None:
    """Add a node. On a busy machine a raylet may exceed Ray's limit of 30 s, so it is repeated."""
    for left in reversed(range(TRIES)):
        try:
            local_cluster.add_node(cluster)
        except LocalClusterError:
            if not left:
                raise
        else:
            return
