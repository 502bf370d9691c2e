"""The packages of a queued job, installed on one node before the job takes any."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

from holdfast_service.job_model.supervisor_protocol import Cluster, PackagesAnswer

PACKAGES_LOOK_S = 0.5
"""Time between two looks at an installation."""


class PackageInstallation:
    """Goes on in the background: a job's driver never waits for it."""

    def __init__(
        self,
        cluster: Cluster,
        requirements: Sequence[str],
        timeout_s: float,
        avoid: Collection[str],
    ) -> None:
        self._began = time.monotonic()
        answer = cluster.install_packages(requirements, timeout_s, avoid)
        self._task = asyncio.create_task(answer, name="packages")

    @property
    def is_done(self) -> bool:
        return self._task.done()

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._began

    def answer(self) -> PackagesAnswer:
        """The answer, once the installation is done. Raises ClusterUnavailable."""
        return self._task.result()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
