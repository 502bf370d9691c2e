"""The embedded cluster of a server, as its settings describe it. Its imports are light: the cluster
can start while the rest of the server is loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.embedded_cluster.local_cluster import (
    KeeperOptions,
    LocalCluster,
    RayHealthCheck,
)
from holdfast_service.embedded_cluster.owner_pipe import NotAPipe, OwnerPipe
from holdfast_service.settings import Settings


def begin(settings: Settings) -> None:
    """Let the cluster of a server that ends with its owner start, and do not wait for it: the owner
    waits. Nothing else is checked before, so it is not for a server that others may use."""
    if not settings.end_with_stdin or settings.ray_address is not None:
        return
    with suppress(NotAPipe):  # the server reports it
        OwnerPipe()
        local_cluster.begin(settings.data_dir, _options(settings))


def ensure(settings: Settings, cancelled: Callable[[], bool] = lambda: False) -> LocalCluster:
    """The running cluster, started or adopted. Raises LocalClusterError."""
    return local_cluster.ensure(settings.data_dir, _options(settings), cancelled=cancelled)


def has_ended(settings: Settings) -> bool:
    """Whether the server has one, and it no longer runs: another server may use it."""
    return settings.ray_address is None and local_cluster.find(settings.data_dir) is None


def environment(settings: Settings) -> dict[str, str]:
    """Environment variables that a process needs before it imports Ray and connects."""
    return local_cluster.ray_environment(local_cluster.folder(settings.data_dir).token)


def _options(settings: Settings) -> KeeperOptions:
    pace = settings.pace
    return KeeperOptions(
        nodes=settings.local_nodes,
        gpus=settings.local_gpus,
        health=RayHealthCheck(pace.node_health_period_s, pace.node_health_failures),
        metrics_port=settings.ray_metrics_port,
        end_with_stdin=settings.end_with_stdin,
    )
