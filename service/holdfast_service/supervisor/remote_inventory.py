"""What a job's remote tier holds, asked beside everything else: it may not answer for long.

One question at a time, in a thread of its own; answers come by callback.
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
class Found:
    checkpoints: tuple[RemoteCheckpoint, ...] = ()
    damaged: tuple[DamagedCheckpoint, ...] = ()


class RemoteListing:
    def __init__(
        self,
        remote: Storage,
        on_found: Callable[[Found], None],
        on_problem: Callable[[str], None],
    ) -> None:
        """`on_found` is called from the thread, for each answer but that to `first`; and, until
        there is one, `on_problem` with why there is none."""
        self._remote = remote
        self._on_found = on_found
        self._on_problem = on_problem
        self._pool = ThreadPoolExecutor(1, "remote-listing")
        self._asked: Future[Found] | None = None
        self.answered = False
        self.problem = ""
        """Why `first` was not answered; empty: it was."""

    def first(self, timeout_s: float) -> Found:
        """The first answer, if it comes in time and is one; otherwise `problem` says why."""
        asked = self._pool.submit(self._list)
        wait([asked], timeout=timeout_s)
        if not asked.done():
            asked.add_done_callback(self._tell)
            self.problem = f"it was silent for {timeout_s:g} s"
            return Found()
        if (error := asked.exception()) is not None:
            _log.error("cannot list the remote tier", exc_info=error)
            self.problem = str(error) or repr(error)
            return Found()
        self.answered = True
        return asked.result()

    def ask(self) -> None:
        """Ask again, unless a question is open."""
        if self._asked is None or self._asked.done():
            self._asked = self._pool.submit(self._list)
            self._asked.add_done_callback(self._tell)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _tell(self, asked: Future[Found]) -> None:
        if asked.cancelled():
            return
        if (error := asked.exception()) is not None:  # it will be asked again, or time is up
            _log.error("cannot list the remote tier", exc_info=error)
            if not self.answered:
                self._on_problem(str(error))
            return
        self.answered = True
        self._on_found(asked.result())

    def _list(self) -> Found:
        damaged: list[DamagedCheckpoint] = []

        def note(uri: str, why: str) -> None:
            name = FOLDER_NAME.fullmatch(uri.rpartition("/")[2])
            damaged.append(DamagedCheckpoint(int(name[1]) if name else 0, uri, why))

        found = list_checkpoints(self._remote, note)
        return Found(
            tuple(
                RemoteCheckpoint(item.step, item.attempt, item.uri, item.nbytes, item.metrics)
                for item in found
            ),
            tuple(damaged),
        )
