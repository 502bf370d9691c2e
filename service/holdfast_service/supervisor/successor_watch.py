"""Watches for a later supervisor of the job, and says how long this one may grant leases.

A supervisor may be cut off without knowing it, and its successor forms a new world once the leases
of the old world have ended. So each grant rests on a recent confirmation that no successor exists:
of the fence in the remote storage, or of the cluster, which starts a successor only in place of
this supervisor. One of the two is enough. Without both, ranks hold until one answers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from holdfast_service.supervisor.fence_record import FenceRecord
from holdfast_workers.protocol.lease import clock_s

_log = structlog.get_logger()

_STORAGE_SHARE = 0.4
"""The storage is asked again when this share of the margin has passed since its confirmation,"""
_CLUSTER_SHARE = 0.6
"""and the cluster is asked when this share has passed."""


class SuccessorWatch:
    """`is_latest()`: whether the cluster knows no later supervisor of the job; None: unknown. It
    may raise, and may take any time. `margin_s`: how long a confirmation lasts."""

    def __init__(
        self, fence: FenceRecord, is_latest: Callable[[], bool | None], margin_s: float
    ) -> None:
        self._fence = fence
        self._is_latest = is_latest
        self._margin_s = margin_s
        self._pool = ThreadPoolExecutor(1, "latest-supervisor")
        self._call: Future[None] | None = None
        self._confirmed_at = 0.0
        self._found = False

    @property
    def found(self) -> bool:
        """Whether there is a later supervisor: this one must end."""
        return self._found or self._fence.is_superseded

    @property
    def granting_s(self) -> float:
        """For how many seconds from now leases may be granted; 0 means not now."""
        confirmed_at = max(self._confirmed_at, self._fence.confirmed_at)
        return max(0.0, confirmed_at + self._margin_s - clock_s())

    def record_refusal(self) -> None:
        """An agent obeys a later supervisor."""
        self._found = True

    def refresh(self) -> None:
        """Ask the storage, and the cluster if the storage has not answered lately."""
        age_s = clock_s() - self._fence.confirmed_at
        if age_s >= self._margin_s * _STORAGE_SHARE:
            self._fence.refresh()
        asked = self._call is not None and not self._call.done()
        if age_s >= self._margin_s * _CLUSTER_SHARE and not asked:
            self._call = self._pool.submit(self._ask_cluster)

    def close(self) -> None:
        self._fence.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask_cluster(self) -> None:
        asked_at = clock_s()
        try:
            latest = self._is_latest()
        except Exception as error:  # unknown: the next refresh asks again
            _log.warning(
                "the cluster does not say whether a later supervisor exists", why=str(error)
            )
            return
        if latest:
            self._confirmed_at = asked_at
        self._found = self._found or latest is False
