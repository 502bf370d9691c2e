"""Jobs as objects, for programs that wait: `client.jobs`, and what it gives.

A `Job` shows what was last seen of it; `refresh`, `wait` and what changes it look again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from holdfast.client.calls import Document, LogFilter
from holdfast.client.data_frames import framed
from holdfast.client.job_snapshot import LastSeen
from holdfast.client.request_methods import RequestMethods
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.jobs import (
    AttemptView,
    CheckpointsView,
    EventView,
    FaultView,
    IncidentView,
    LogLineView,
    MetricPoint,
)


class Jobs:
    """The jobs of a server."""

    def __init__(self, client: RequestMethods) -> None:
        self._client = client

    def submit(self, spec: Document, *, idempotency_key: str | None = None) -> Job:
        """Submit a `JobSpec`, or a mapping as a YAML file has it.

        Raises InvalidSpec with every fault; IdempotencyConflict for a key used otherwise. It is
        tried again by itself without ever making two jobs.
        """
        return Job(self._client, self._client.submit(spec, idempotency_key=idempotency_key))

    def get(self, word: str) -> Job:
        """By name, id, or the beginning of the id. Raises AmbiguousName, JobNotFound."""
        return Job(self._client, self._client.get(self._client.find(word)))

    def list(
        self, *, state: Collection[str] | None = None, name: str | None = None
    ) -> Iterator[Job]:
        """Newest first; pages are fetched as they are needed."""
        for view in self._client.list(state=state, name=name):
            yield Job(self._client, view)

    __iter__ = list


class Job(LastSeen):
    """One job of a server."""

    _client: RequestMethods

    def refresh(self) -> Job:
        """Look again."""
        self.view = self._client.get(self.id)
        return self

    def wait(
        self, timeout_s: float | None = None, *, check: bool = False, poll_s: float = 0.5
    ) -> Job:
        """Until it has ended, however it did. Raises WaitTimeout; with `check` JobFailed, too."""
        self.view = self._client.wait(self.id, timeout_s, poll_s)
        if check:
            self.raise_for_state()
        return self

    def cancel(self, *, now: bool = False) -> Job:
        """Ask for its end; its last state is saved before, unless `now`. Raises JobEnded."""
        self.view = self._client.cancel(self.id, now=now)
        return self

    def pause(self) -> Job:
        """Ask it to save its state and leave the cluster. Raises JobEnded."""
        self.view = self._client.pause(self.id)
        return self

    def resume(self) -> Job:
        """Let it go on from its newest checkpoint. Raises JobEnded."""
        self.view = self._client.resume(self.id)
        return self

    def events(self, *, follow: bool = False, after: int = 0) -> Iterator[EventView]:
        """Those that there are; with `follow` as they come, until the job is over."""
        if follow:
            return self._client.follow(self.id, after)
        return self._client.all_events(self.id, after)

    def logs(
        self,
        *,
        follow: bool = False,
        rank: int | None = None,
        attempt: int | None = None,
        since: float | None = None,
        grep: str | None = None,
        level: str | None = None,
        tail: int | None = None,
    ) -> Iterator[LogLineView]:
        """What its ranks wrote; with `follow` as it comes, until the job is over.

        `since` is in Unix seconds, `grep` a regular expression (RE2), `level` that or worse,
        `tail` so many of the last lines. Raises InvalidRegex.
        """
        wanted = LogFilter(rank, attempt, since, grep, level)
        if follow:
            return self._client.follow_logs(self.id, **wanted.params(), tail=tail)
        return self._client.all_logs(self.id, wanted, tail=tail)

    def metrics(self, names: Collection[str] | None = None) -> Any:
        """The committed history, a point per step: a pandas DataFrame where pandas is installed,
        with the step as its index; else a list of `MetricPoint`. Raises UnknownMetric."""
        return framed(list(self.points(names)))

    def points(
        self, names: Collection[str] | None = None, after_step: int = 0
    ) -> Iterator[MetricPoint]:
        """The same one by one, as plain values; pages are fetched as they are needed."""
        return self._client.metrics(self.id, names, after_step)

    def incidents(self) -> Sequence[IncidentView]:
        """Every fault and what was done about it, oldest first."""
        return self._client.incidents(self.id)

    def attempts(self) -> Sequence[AttemptView]:
        """Every world that was formed for it, oldest first."""
        return self._client.attempts(self.id)

    def goodput(self) -> GoodputView:
        """Where its time went, so far or in all."""
        return self._client.goodput(self.id)

    def checkpoints(self) -> CheckpointsView:
        """What it can go on from, by tier."""
        return self._client.checkpoints(self.id)

    def digests(self) -> dict[int, str]:
        """Digest of its whole state after each step."""
        return self._client.digests(self.id)

    def inject(self, kind: str, **how: Any) -> FaultView:
        """Break something of it on purpose. Raises InjectionDisabled, InvalidFault."""
        return self._client.inject(self.id, kind, **how)
