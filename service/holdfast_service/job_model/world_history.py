"""The meshes that a job had over time, the absences, and the device-seconds of any interval. Pure.

A world counts from the moment at which its attempt began to form. The time before the first attempt
of a stay on the cluster counts as that attempt's: its devices are held for it.

In an absence nothing of the job ran on the cluster, so it held no device. Two stored facts show
one: a supervisor had to be created and nothing of the job was left beside it (from the last sign of
life until then), or the supervisor's own loop stood still (its machine was stopped). A server that
was away proves nothing: the ranks may have trained.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True)
class FormedWorld:
    """The mesh of an attempt. `at`: when the attempt began to form; `incident`: that made it
    necessary, if any."""

    at: float
    mesh: Mapping[str, int]
    world_size: int
    incident: int | None = None


@dataclass(frozen=True)
class WorldPeriod:
    """A period on the cluster with one mesh."""

    since: float
    until: float
    mesh: Mapping[str, int]
    world_size: int


LEAST_ABSENCE_S = 60.0
"""A supervisor whose loop stood still for less was busy, or its machine was."""


@dataclass(frozen=True)
class Absence:
    """A time in which nothing of the job ran. `gone`: everything of it had ended, so that it
    started again; otherwise its machine stood still, and it went on where it was."""

    since: float
    until: float
    gone: bool = False


def without_steps(absences: Sequence[Absence], ends: Iterable[float]) -> list[Absence]:
    """The absences as the steps leave them. `ends`: when steps ended. A step that ended meanwhile
    shows that ranks ran on another machine than the one that stood still."""
    marks = sorted(ends)
    found: list[Absence] = []
    for absence in absences:
        if absence.gone:
            found.append(absence)
            continue
        inside = [at for at in marks if absence.since < at < absence.until]
        edges = [absence.since, *inside, absence.until]
        found += [
            Absence(since, until)
            for since, until in pairwise(edges)
            if until - since >= LEAST_ABSENCE_S
        ]
    return found


class PresenceClock:
    """A clock in microseconds that stands still during absences, and runs as any other between."""

    def __init__(self, absences: Iterable[Absence]) -> None:
        self._edges: list[tuple[int, int]] = []
        """Start and end of the absences, in order, not overlapping."""
        for absence in sorted(absences, key=lambda absence: absence.since):
            since, until = _us(absence.since), _us(absence.until)
            if self._edges and since <= self._edges[-1][1]:
                since, before = self._edges.pop()
                until = max(until, before)
            if until > since:
                self._edges.append((since, until))

    def at(self, seconds: float) -> float:
        """The time of this clock, in seconds, at a time of day."""
        at_us = _us(seconds)
        return (at_us - self._absent_until(at_us)) / 1e6

    def stretches(self, since: float, until: float) -> list[tuple[float, float]]:
        """The times of day that this clock shows as the interval; one without length has none."""
        found: list[tuple[float, float]] = []
        cursor, end, passed = _us(since), _us(until), 0
        for start, stop in self._edges:
            here = start - passed
            if cursor < here:
                upto = min(end, here)
                if upto > cursor:
                    found.append(((cursor + passed) / 1e6, (upto + passed) / 1e6))
                cursor = upto
            if cursor >= end:
                return found
            passed += stop - start
        if end > cursor:
            found.append(((cursor + passed) / 1e6, (end + passed) / 1e6))
        return found

    def _absent_until(self, at_us: int) -> int:
        return sum(min(at_us, stop) - start for start, stop in self._edges if start < at_us)


def world_periods(
    formed: Sequence[FormedWorld], held: Sequence[tuple[float, float]]
) -> tuple[WorldPeriod, ...]:
    """The periods with one mesh, in order. `formed`: of all attempts, in order. `held`: the
    intervals on the cluster, in order. An interval in which no attempt forms has no period."""
    periods: list[WorldPeriod] = []
    for since, until in held:
        within = [world for world in formed if since <= world.at < until]
        begin = since
        for place, world in enumerate(within):
            end = within[place + 1].at if place + 1 < len(within) else until
            _append(periods, WorldPeriod(begin, max(begin, end), world.mesh, world.world_size))
            begin = max(begin, end)
    return tuple(periods)


def mesh_changes(formed: Sequence[FormedWorld]) -> dict[int, tuple[FormedWorld, FormedWorld]]:
    """Incident -> the world before it and its newest world, where these have different meshes.
    `formed`: of all attempts, in order."""
    found: dict[int, tuple[FormedWorld, FormedWorld]] = {}
    before: FormedWorld | None = None
    last: FormedWorld | None = None
    for world in formed:
        if last is None or world.incident is None or world.incident != last.incident:
            before = last
        if world.incident is not None and before is not None:
            found[world.incident] = (before, world)
        last = world
    return {number: pair for number, pair in found.items() if pair[0].mesh != pair[1].mesh}


class DeviceClock:
    """Adds up device-microseconds. The sum over an interval equals the sum over its parts."""

    def __init__(self, periods: Sequence[WorldPeriod], otherwise: int) -> None:
        """`otherwise`: the number of devices at moments outside of all periods."""
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._sums: list[int] = []
        self._otherwise = otherwise
        for period in periods:
            self._change(_us(period.since), period.world_size)
            self._change(_us(period.until), otherwise)

    def between(self, since_us: int, until_us: int) -> int:
        """Device-microseconds from `since_us` until `until_us`."""
        return self._until(until_us) - self._until(since_us)

    def size_before(self, at_us: int) -> int:
        """The number of devices in the last microsecond before `at_us`."""
        return self.between(at_us - 1, at_us)

    def _until(self, at_us: int) -> int:
        """Device-microseconds since time zero."""
        place = bisect_right(self._starts, at_us) - 1
        if place < 0:
            return at_us * self._otherwise
        return self._sums[place] + (at_us - self._starts[place]) * self._sizes[place]

    def _change(self, at_us: int, size: int) -> None:
        at_us = max(at_us, self._starts[-1]) if self._starts else at_us
        self._sums.append(self._until(at_us))
        self._starts.append(at_us)
        self._sizes.append(size)


def _append(periods: list[WorldPeriod], period: WorldPeriod) -> None:
    last = periods[-1] if periods else None
    if last is not None and last.until == period.since and last.mesh == period.mesh:
        periods[-1] = replace(last, until=period.until)
    elif period.until > period.since:
        periods.append(period)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
