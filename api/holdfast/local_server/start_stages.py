"""What a server that starts is doing, as a sentence for the user who waits."""

from __future__ import annotations

from pathlib import Path

from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.embedded_cluster.local_cluster import LocalCluster


def stage(data_dir: Path, nodes: int) -> str:
    """The stage of the server with this data directory and a cluster of `nodes`."""
    return text(local_cluster.folder(data_dir).read(), nodes)


def text(cluster: LocalCluster | None, nodes: int) -> str:
    """`cluster`: as its keeper has recorded it; None: not yet."""
    if cluster is None:
        return "starting a server on this machine"
    if cluster.ready:
        return "connecting to Ray"
    if not cluster.nodes:
        return "starting Ray"
    return f"starting Ray: {len(cluster.nodes)} of {nodes + 1} raylets run"
