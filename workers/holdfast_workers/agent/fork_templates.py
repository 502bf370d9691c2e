"""Templates: processes that have built a rank's model, from which workers for the rank are forked.

Building a small model takes a fifth of a second of processor time; forking a process that has built
it takes a few hundredths. A template serves one place on one mesh. It never trains, has no thread
and no process group, and may die at any time: workers are then forked from the zygote and build the
model themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import Child, ChildProcesses, fork_from
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.protocol.processes import ProcessReady, RankPlace, TemplateJob, WorkerJob


class ForkTemplates:
    """The templates of one node. Thread-safe."""

    def __init__(
        self,
        child_processes: ChildProcesses,
        prefix: str,
        build_timeout_s: float,
        fork_timeout_s: float,
    ) -> None:
        """`prefix`: of the processes' names."""
        self._child_processes = child_processes
        self._prefix = prefix
        self._build_timeout_s = build_timeout_s
        self._fork_timeout_s = fork_timeout_s
        self._io: NodeIO | None = None
        self._make_lock = threading.Lock()
        self._changed = threading.Condition()
        self._fork_locks: dict[str, threading.Lock] = {}
        self._alive: dict[str, Child] = {}
        self._ready: dict[RankPlace, Child] = {}
        self._unfit: set[RankPlace] = set()
        self._count = 0
        self._closing = False

    def attach(self, io: NodeIO) -> None:
        """Set the I/O thread that reports the templates' exits."""
        self._io = io

    def keep(self, places: Collection[RankPlace]) -> list[Child]:
        """Keep only the templates of these places; the caller kills the others, which are returned.
        Places of which no template could be made are forgotten too, so they are tried again when
        they are requested again."""
        with self._changed:
            dropped = [self._ready.pop(place) for place in [*self._ready] if place not in places]
            self._unfit.intersection_update(places)
        return dropped

    def ensure(self, places: Collection[RankPlace]) -> None:
        """Make the missing templates, and return when each can be forked from or has proved
        impossible. Raises ZygoteFailed."""
        for place in places:
            with self._make_lock:
                with self._changed:
                    if self._closing or place in self._ready or place in self._unfit:
                        continue
                self._make(place)

    def has(self, place: RankPlace) -> bool:
        with self._changed:
            return place in self._ready

    def fork(self, name: str, job: WorkerJob) -> Child:
        """Fork a worker for the place of `job`: from the place's template if there is one that
        answers, otherwise from the zygote. Raises ZygoteFailed."""
        with self._changed:
            template = self._ready.get(job.place) if job.place is not None else None
            lock = self._fork_locks[template.name] if template is not None else None
        if template is not None and lock is not None:
            with lock:
                try:
                    return fork_from(template.end, name, job)
                except (WorkersError, OSError):
                    self._forget(template)
                    template.kill()
        return self._child_processes.fork(name, job)

    def on_exit(self, child: Child) -> None:
        """Handle the end of a template's process."""
        self._forget(child)
        with self._changed:
            self._alive.pop(child.name, None)
            self._fork_locks.pop(child.name, None)
            self._changed.notify_all()

    def stop(self, wait_s: float) -> None:
        """Kill all templates for good, and wait up to `wait_s` for their exits."""
        with self._changed:
            self._closing = True
            children = list(self._alive.values())
        for child in children:
            child.kill()
        with self._changed:
            self._changed.wait_for(lambda: not self._alive, wait_s)

    def _make(self, place: RankPlace) -> None:
        self._count += 1
        name = f"{self._prefix}.t{self._count}"
        child = self._child_processes.fork(name, TemplateJob(place))
        with self._changed:
            self._alive[name], self._fork_locks[name] = child, threading.Lock()
        child.end.settimeout(self._build_timeout_s)
        assert self._io is not None
        self._io.watch(child)
        try:
            answer: object = control_channel.receive(child.end, *TemplateJob.answers)
            fit = isinstance(answer, ProcessReady)
            child.end.settimeout(self._fork_timeout_s)
        except (WorkersError, OSError):
            fit = False
        with self._changed:
            if fit and name in self._alive and not self._closing:
                self._ready[place] = child
                return
            if not fit:
                self._unfit.add(place)
        child.kill()

    def _forget(self, child: Child) -> None:
        with self._changed:
            for place in [place for place, ready in self._ready.items() if ready is child]:
                del self._ready[place]
