"""Jobs as objects, for an event loop: `AsyncClient.jobs`, and what it gives; see
`services/jobs.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from holdfast.client.async_request_methods import AsyncRequestMethods
from holdfast.client.calls import Document, LogFilter
from holdfast.client.data_frames import framed
from holdfast.client.job_snapshot import LastSeen
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


class AsyncJobs:
    """The jobs of a server."""

    def __init__(self, client: AsyncRequestMethods) -> None:
        self._client = client

    async def submit(self, spec: Document, *, idempotency_key: str | None = None) -> AsyncJob:
        """Submit a `JobSpec`, or a mapping as a YAML file has it.

        Raises InvalidSpec with every fault; IdempotencyConflict for a key used otherwise. It is
        tried again by itself without ever making two jobs.
        """
        return AsyncJob(
            self._client, await self._client.submit(spec, idempotency_key=idempotency_key)
        )

    async def get(self, word: str) -> AsyncJob:
        """By name, id, or the beginning of the id. Raises AmbiguousName, JobNotFound."""
        return AsyncJob(self._client, await self._client.get(await self._client.find(word)))

    async def list(
        self, *, state: Collection[str] | None = None, name: str | None = None
    ) -> AsyncIterator[AsyncJob]:
        """Newest first; pages are fetched as they are needed."""
        async for view in self._client.list(state=state, name=name):
            yield AsyncJob(self._client, view)

    __aiter__ = list


class AsyncJob(LastSeen):
    """One job of a server."""

    _client: AsyncRequestMethods

    async def refresh(self) -> AsyncJob:
        """Look again."""
        self.view = await self._client.get(self.id)
        return self

    async def wait(
        self, timeout_s: float | None = None, *, check: bool = False, poll_s: float = 0.5
    ) -> AsyncJob:
        """Until it has ended, however it did. Raises WaitTimeout; with `check` JobFailed, too."""
        self.view = await self._client.wait(self.id, timeout_s, poll_s)
        if check:
            self.raise_for_state()
        return self

    async def cancel(self, *, now: bool = False) -> AsyncJob:
        """Ask for its end; its last state is saved before, unless `now`. Raises JobEnded."""
        self.view = await self._client.cancel(self.id, now=now)
        return self

    async def pause(self) -> AsyncJob:
        """Ask it to save its state and leave the cluster. Raises JobEnded."""
        self.view = await self._client.pause(self.id)
        return self

    async def resume(self) -> AsyncJob:
        """Let it go on from its newest checkpoint. Raises JobEnded."""
        self.view = await self._client.resume(self.id)
        return self

    def events(self, *, follow: bool = False, after: int = 0) -> AsyncIterator[EventView]:
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
    ) -> AsyncIterator[LogLineView]:
        """What its ranks wrote; with `follow` as it comes, until the job is over.

        `since` is in Unix seconds, `grep` a regular expression (RE2), `level` that or worse,
        `tail` so many of the last lines. Raises InvalidRegex.
        """
        wanted = LogFilter(rank, attempt, since, grep, level)
        if follow:
            return self._client.follow_logs(self.id, **wanted.params(), tail=tail)
        return self._client.all_logs(self.id, wanted, tail=tail)

    async def metrics(self, names: Collection[str] | None = None) -> Any:
        """The committed history, a point per step: a pandas DataFrame where pandas is installed,
        with the step as its index; else a list of `MetricPoint`. Raises UnknownMetric."""
        return framed([point async for point in self.points(names)])

    def points(
        self, names: Collection[str] | None = None, after_step: int = 0
    ) -> AsyncIterator[MetricPoint]:
        """The same one by one, as plain values; pages are fetched as they are needed."""
        return self._client.metrics(self.id, names, after_step)

    async def incidents(self) -> Sequence[IncidentView]:
        """Every fault and what was done about it, oldest first."""
        return await self._client.incidents(self.id)

    async def attempts(self) -> Sequence[AttemptView]:
        """Every world that was formed for it, oldest first."""
        return await self._client.attempts(self.id)

    async def goodput(self) -> GoodputView:
        """Where its time went, so far or in all."""
        return await self._client.goodput(self.id)

    async def checkpoints(self) -> CheckpointsView:
        """What it can go on from, by tier."""
        return await self._client.checkpoints(self.id)

    async def digests(self) -> dict[int, str]:
        """Digest of its whole state after each step."""
        return await self._client.digests(self.id)

    async def inject(self, kind: str, **how: Any) -> FaultView:
        """Break something of it on purpose. Raises InjectionDisabled, InvalidFault."""
        return await self._client.inject(self.id, kind, **how)
