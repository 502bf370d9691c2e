"""One preparation on the cluster, of whatever kind: its tasks run on nodes, and are repeated until
each has a result, or one of them refuses the files."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import ray
import structlog

from holdfast_service.cluster.node_tasks import NoNode
from holdfast_service.cluster.preparation_tasks import TaskEnd, TaskSlots, end_of
from holdfast_service.job_model.preparation import SourceProgress, WeightsProgress
from holdfast_service.wording import duration, plural
from holdfast_workers.checkpoint.storage import TransientStorageError
from holdfast_workers.errors import WorkersError

FRESH_S = 10.0
"""An outcome for which nobody has asked for longer is found anew: files may have changed."""
LOOK_S = 1.0
RETRY_S = 5.0
"""Pause before another try after the storage failed for a while."""
MOST_DEATHS = 5
"""Processes that one task may take with it."""
SILENT_S = 60.0
"""Time without news after which the progress says so."""
QUEUED = "it waits for other preparations"
BUSY = "all nodes are busy with other preparations"

_log = structlog.get_logger()
Progress = TypeVar("Progress", SourceProgress, WeightsProgress)
Item = TypeVar("Item")


class _NobodyAsks(Exception):
    """Nobody asks for it any more."""


class _Refused(WorkersError):
    """The files cannot be prepared as they are."""


class PreparationWork(ABC, Generic[Progress]):
    """It runs in one thread; others read its progress."""

    remedy: str
    """What to do if a task takes its process with it each time."""

    def __init__(self, progress: Progress, slots: TaskSlots) -> None:
        self._slots = slots
        self._progress: Progress = replace(progress, waits=QUEUED)
        self._news_at = self.asked_at = time.monotonic()
        self._deaths: Counter[str] = Counter()
        """Of processes, by what they did."""
        self.abandoned = False

    @property
    def is_stale(self) -> bool:
        return self._progress.is_over and time.monotonic() - self.asked_at > FRESH_S

    def run(self) -> bool:
        """Prepare it. False: it must be run again, as a storage failed for a while, or no node is
        there."""
        try:
            self._prepare()
        except _NobodyAsks:
            pass
        except (TransientStorageError, NoNode) as error:
            self._note(waits=str(error))
            time.sleep(RETRY_S)
            return False
        except WorkersError as error:
            self._refuse(str(error))
        except BaseException as error:
            _log.exception("a preparation failed")
            self._refuse(f"an unexpected error ({type(error).__name__}): see the log of Ray")
        return True

    @abstractmethod
    def _prepare(self) -> None:
        """Raises TransientStorageError, NoNode, other WorkersErrors as refusals, _NobodyAsks."""

    def _refuse(self, why: str) -> None:
        self._note(error=why, waits="")

    def _carry_out(
        self,
        items: Iterable[Item],
        begin: Callable[[str, Item], Any],
        ended: Callable[[Item, Any], None],
        does: Callable[[Item], str],
    ) -> None:
        """Have a task carried out for each item, as many at once as nodes take.

        `begin(node, item)`: the reference of a task with a `TaskEnd`. `ended(item, result)`: called
        as soon as it has one. `does(item)`: what its process does, such as `made part 3`.
        """
        waiting = deque(items)
        flying: dict[Any, tuple[str, Item]] = {}
        pause_until = 0.0
        try:
            while waiting or flying:
                while waiting and time.monotonic() >= pause_until:
                    node = self._take_node()
                    if node is None:
                        break
                    item = waiting.popleft()
                    try:
                        task = begin(node, item)
                    except BaseException:
                        self._slots.give_back(node)
                        raise
                    flying[task] = node, item
                self._note_turn(is_busy=not flying and time.monotonic() >= pause_until)
                if not flying:
                    time.sleep(LOOK_S)
                for task in self._wait(list(flying)) if flying else ():
                    end = end_of(task)
                    node, item = flying.pop(task)
                    self._slots.give_back(node, end.unfit)
                    result = self._result(end, does(item))
                    if result is not None:
                        ended(item, result)
                    else:
                        waiting.append(item)
                        pause_until = time.monotonic() + RETRY_S
        finally:
            for task, (node, _) in flying.items():
                ray.cancel(task, force=True)  # a file system that hangs holds no process
                self._slots.give_back(node)

    def _carry_out_one(self, begin: Callable[[str], Any], does: str) -> Any:
        """The result of one task."""
        results: list[Any] = []

        def ended(_: None, result: Any) -> None:
            results.append(result)

        self._carry_out([None], lambda node, _: begin(node), ended, lambda _: does)
        return results[0]

    def _take_node(self) -> str | None:
        """A node for a task. Raises NoNode, _NobodyAsks."""
        if self.abandoned:
            raise _NobodyAsks
        return self._slots.take()

    def _wait(self, tasks: list[Any]) -> list[Any]:
        """The first of the tasks that end. Raises _NobodyAsks."""
        while True:
            ended, _ = ray.wait(tasks, timeout=LOOK_S)
            if ended:
                return list(ended)
            if self.abandoned:
                raise _NobodyAsks

    def _result(self, end: TaskEnd, does: str) -> Any:
        """The result of a task; None: it is tried again. Raises _Refused."""
        if end.refused:
            raise _Refused(end.refused)
        if end.died:
            self._deaths[does] += 1
            times = plural(self._deaths[does], "time")
            why = f"the process that {does} ended {times} ({end.died})"
            if self._deaths[does] >= MOST_DEATHS:
                raise _Refused(f"{why}: {self.remedy}")
            self._note(waits=why)
        elif end.result is None:
            self._note(waits=end.later or end.unfit)
        return end.result

    def _with_silence(self, doing: str) -> Progress:
        """The progress, to somebody who asks; `doing`: what is done to its files at present."""
        now = self.asked_at = time.monotonic()
        found, silent_s = self._progress, now - self._news_at
        if found.is_over or found.waits or silent_s < SILENT_S:
            return found
        why = f"its files are being {doing}, and nothing has ended for {duration(silent_s)}"
        return replace(found, waits=why)

    def _note_turn(self, *, is_busy: bool) -> None:
        """Whether it waits for nodes that others use. Another reason to wait is kept until it is
        over."""
        if is_busy:
            self._note(waits=BUSY)
        elif self._progress.waits in (QUEUED, BUSY):
            self._note(waits="")

    def _note(self, **changes: Any) -> None:
        self._news_at = time.monotonic()
        self._progress = replace(self._progress, **changes)
