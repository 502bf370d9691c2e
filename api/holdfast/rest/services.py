"""The services and limits that the routers use, and their FastAPI dependencies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from holdfast.rest.limits import UploadLimits
from holdfast.rest.local_access import LocalAccess
from holdfast.rest.origins import Origin
from holdfast_service.daemon_threads import DaemonThreads
from holdfast_service.job_model.supervisor_protocol import Cluster
from holdfast_service.live.hub import LiveHub
from holdfast_service.operations.export_files import ExportFiles
from holdfast_service.operations.runner import OperationRunner
from holdfast_service.operations.service import OperationService
from holdfast_service.readers.fleet_metrics import FleetReader
from holdfast_service.readers.goodput_cache import GoodputCache
from holdfast_service.services.checkpoints import CheckpointService
from holdfast_service.services.cluster_check import ClusterCheck
from holdfast_service.services.code_packages import CodeService
from holdfast_service.services.fault_injection import InjectionService
from holdfast_service.services.job_removal import JobRemoval
from holdfast_service.services.jobs import JobService
from holdfast_service.services.nodes import NodeService
from holdfast_service.services.overview import Overview
from holdfast_service.services.replays import ReplayService
from holdfast_service.services.token_sets import TokenSetService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

Probe = Callable[[], Awaitable[str | None]]
"""Checks a part of the control plane: returns None if it is ready, otherwise the problem."""


@dataclass(frozen=True)
class Services:
    jobs: JobService
    checkpoints: CheckpointService
    nodes: NodeService
    cluster_check: ClusterCheck
    injections: InjectionService
    overview: Overview
    live: LiveHub
    code: CodeService
    fleet: FleetReader
    replays: ReplayService
    removal: JobRemoval
    operations: OperationService
    operation_runner: OperationRunner
    token_sets: TokenSetService
    probes: Mapping[str, Probe] = field(default_factory=dict)
    document_threads: Executor = field(default_factory=lambda: DaemonThreads(2, "document"))
    """Parse the bodies of requests, which takes up to seconds of processor time each."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server shuts down: streams end, and clients resume elsewhere or later."""
    allowed_hosts: frozenset[str] | None = None
    """Host names that requests may use; None: any (the server was exposed on purpose)."""
    allowed_origins: frozenset[Origin] = frozenset()
    """Origins of web pages that may send requests, beside the server's own."""
    access: LocalAccess | None = None
    """Who may send requests; None: everybody."""
    max_body_bytes: int = 2**20
    max_code_bytes: int = 2**25
    upload_limits: UploadLimits = field(default_factory=UploadLimits)
    spool_folder: str | None = None
    """Where large bodies arrive, in files without names; None: where the system puts such files."""
    metrics_of_jobs: bool = False
    """Whether `/metrics` has series for each live job."""
    probe_timeout_s: float = 5.0
    keep_alive_s: float = 15.0


def services_over(
    store: Store,
    cluster: Cluster,
    settings: Settings,
    wake: Callable[[str], None] = lambda _job_id: None,
    wake_for_nodes: Callable[[Iterable[str]], None] = lambda _jobs: None,
) -> Services:
    """All services on one store and cluster, with the limits of the settings. `wake(job_id)` makes
    a reconciler in this process handle the job now; `wake_for_nodes(jobs)` does the same after the
    usable nodes of these jobs have changed."""
    nodes = NodeService(store, wake_for_nodes)
    goodput_cache = GoodputCache()
    jobs = JobService(store, cluster, settings, wake, goodput_cache)
    checkpoints = CheckpointService(store, settings)
    files = ExportFiles(settings.data_dir / "exports")
    runner = OperationRunner(store, checkpoints, files, settings)
    return Services(
        jobs=jobs,
        checkpoints=checkpoints,
        nodes=nodes,
        cluster_check=ClusterCheck(cluster, settings),
        injections=InjectionService(store, settings, wake),
        overview=Overview(store, nodes, settings, goodput_cache),
        live=LiveHub(store),
        code=CodeService(store, settings),
        fleet=FleetReader(store),
        replays=ReplayService(store, jobs),
        removal=JobRemoval(store, checkpoints, settings),
        operations=OperationService(store, checkpoints, files, settings, runner.wake),
        operation_runner=runner,
        token_sets=TokenSetService(jobs, cluster, settings),
        max_code_bytes=settings.max_code_bytes,
        spool_folder=str(settings.data_dir),
        metrics_of_jobs=settings.metrics_of_jobs,
    )


# A coroutine, because FastAPI runs plain functions in threads.
async def services(request: Request) -> Services:
    state: Services = request.app.state.services
    return state


ServicesDep = Annotated[Services, Depends(services)]
