"""Lists the checkpoints in a job's remote tier without blocking on a slow or silent storage.

At most one listing runs at a time, in its own thread; results arrive by callback.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import structlog

from holdfast_service.placement.restore_points import RemoteCheckpoint
from holdfast_service.recovery.core_state.inputs import DamagedCheckpoint
from holdfast_workers.checkpoint.manifest import FOLDER_NAME, list_checkpoints
from holdfast_workers.checkpoint.storage import Storage

_log = structlog.get_logger()


@dataclass(frozen=True)
class InventoryResult:
    checkpoints: tuple[RemoteCheckpoint, ...] = ()
    damaged: tuple[DamagedCheckpoint, ...] = ()


class RemoteInventory:
    def __init__(
        self,
        remote: Storage,
        on_found: Callable[[InventoryResult], None],
        on_problem: Callable[[str], None],
    ) -> None:
        """Both callbacks run in the listing thread: `on_found` for each result except that of
        `first`; `on_problem` with the reason of a failure, until the first success."""
        self._remote = remote
        self._on_found = on_found
        self._on_problem = on_problem
        self._pool = ThreadPoolExecutor(1, "remote-listing")
        self._pending: Future[InventoryResult] | None = None
        self.answered = False
        self.problem = ""
        """Why `first` failed; empty if it succeeded."""

    def first(self, timeout_s: float) -> InventoryResult:
        """The first listing; empty on failure or timeout, with the reason in `problem`."""
        pending = self._pool.submit(self._list)
        wait([pending], timeout=timeout_s)
        if not pending.done():
            pending.add_done_callback(self._report_listing)
            self.problem = f"it was silent for {timeout_s:g} s"
            return InventoryResult()
        if (error := pending.exception()) is not None:
            _log.error("cannot list the remote tier", exc_info=error)
            self.problem = str(error) or repr(error)
            return InventoryResult()
        self.answered = True
        return pending.result()

    def refresh(self) -> None:
        """Start a listing unless one is running."""
        if self._pending is None or self._pending.done():
            self._pending = self._pool.submit(self._list)
            self._pending.add_done_callback(self._report_listing)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _report_listing(self, pending: Future[InventoryResult]) -> None:
        if pending.cancelled():
            return
        if (error := pending.exception()) is not None:  # the caller tries again or its time is over
            _log.error("cannot list the remote tier", exc_info=error)
            if not self.answered:
                self._on_problem(str(error))
            return
        self.answered = True
        self._on_found(pending.result())

    def _list(self) -> InventoryResult:
        damaged: list[DamagedCheckpoint] = []

        def record_damage(uri: str, why: str) -> None:
            name = FOLDER_NAME.fullmatch(uri.rpartition("/")[2])
            damaged.append(DamagedCheckpoint(int(name[1]) if name else 0, uri, why))

        manifests = list_checkpoints(self._remote, record_damage)
        return InventoryResult(
            tuple(
                RemoteCheckpoint(
                    manifest.step,
                    manifest.attempt,
                    manifest.uri,
                    manifest.nbytes,
                    manifest.metrics,
                    manifest.mesh,
                )
                for manifest in manifests
            ),
            tuple(damaged),
        )
