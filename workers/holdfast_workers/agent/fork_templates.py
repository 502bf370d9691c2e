"""Templates: for a rank, a process in which its model stands already, to fork its workers from.

To build a small model anew costs a fifth of a second of a processor; a fork of a process that has
built it, a few hundredths. A template is good for one place on one mesh. It never trains, has no
thread and no process group, and may die at any time: workers are then forked from the zygote, and
build by themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, NamedTuple

from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import Brood, Child, fork_from
from holdfast_workers.ipc.io_loop import NodeIO


class Place(NamedTuple):
    """A rank of a mesh; the axes are in their order."""

    mesh: tuple[tuple[str, int], ...]
    rank: int

    @classmethod
    def of(cls, expected: dict[str, Any]) -> Place:
        """`expected`: {mesh, rank}, as a worker is told of it."""
        return cls(tuple(expected["mesh"].items()), expected["rank"])

    def expected(self) -> dict[str, Any]:
        return {"mesh": dict(self.mesh), "rank": self.rank}


class Templates:
    """Those of one node. Its methods may be called by several threads."""

    def __init__(
        self, brood: Brood, prefix: str, build_timeout_s: float, fork_timeout_s: float
    ) -> None:
        """`prefix`: of their names."""
        self._brood = brood
        self._prefix = prefix
        self._build_timeout_s = build_timeout_s
        self._fork_timeout_s = fork_timeout_s
        self._io: NodeIO | None = None
        self._making = threading.Lock()
        self._changed = threading.Condition()
        self._asked: dict[str, threading.Lock] = {}
        self._alive: dict[str, Child] = {}
        self._ready: dict[Place, Child] = {}
        self._unfit: set[Place] = set()
        self._made = 0
        self._closing = False

    def attach(self, io: NodeIO) -> None:
        """Name the thread that sees their ends."""
        self._io = io

    def keep(self, places: Collection[Place]) -> None:
        """End those for other places; what was of no use may be tried again once it is wanted
        anew."""
        with self._changed:
            dropped = [self._ready.pop(place) for place in [*self._ready] if place not in places]
            self._unfit.intersection_update(places)
        for child in dropped:
            child.kill()

    def ensure(self, places: Collection[Place]) -> None:
        """Make those that are missing, and return when they can be forked from, or cannot be had.
        Raises ZygoteFailed."""
        for place in places:
            with self._making:
                with self._changed:
                    if self._closing or place in self._ready or place in self._unfit:
                        continue
                self._make(place)

    def has(self, place: Place) -> bool:
        with self._changed:
            return place in self._ready

    def fork(self, name: str, request: dict[str, Any]) -> Child:
        """A worker for the place that `request` expects: from its template if it has one that
        answers, from the zygote if not. Raises ZygoteFailed."""
        place = Place.of(request["expected"])
        with self._changed:
            template = self._ready.get(place)
            lock = self._asked[template.name] if template is not None else None
        if template is not None and lock is not None:
            with lock:
                try:
                    return fork_from(template.end, "worker", name, request)
                except (control_channel.ControlClosed, OSError):
                    self._forget(template)
                    template.kill()
        return self._brood.fork("worker", name, request)

    def exited(self, child: Child) -> None:
        """A template's process is gone."""
        self._forget(child)
        with self._changed:
            self._alive.pop(child.name, None)
            self._asked.pop(child.name, None)
            self._changed.notify_all()

    def stop(self, wait_s: float) -> None:
        """End all, for good, and wait a little for them to be gone."""
        with self._changed:
            self._closing = True
            children = list(self._alive.values())
        for child in children:
            child.kill()
        with self._changed:
            self._changed.wait_for(lambda: not self._alive, wait_s)

    def _make(self, place: Place) -> None:
        self._made += 1
        name = f"{self._prefix}.t{self._made}"
        child = self._brood.fork("template", name, {"expected": place.expected(), "env": {}})
        with self._changed:
            self._alive[name], self._asked[name] = child, threading.Lock()
        child.end.settimeout(self._build_timeout_s)
        assert self._io is not None
        self._io.watch(child)
        try:
            fit = control_channel.receive(child.end)["op"] == "ready"
            child.end.settimeout(self._fork_timeout_s)
        except (control_channel.ControlClosed, OSError):
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
            for place in [place for place, one in self._ready.items() if one is child]:
                del self._ready[place]
