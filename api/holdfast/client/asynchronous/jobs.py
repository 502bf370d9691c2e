"""The REST API as Python calls and values (`holdfast.Client`, `holdfast.AsyncClient`), and jobs as
objects.

The methods of a client take ids and return plain values, one method per request. `client.jobs`
returns jobs as objects, which is the easiest way to write programs. A job holds what was fetched
last; `refresh`, `wait` and the methods that change the job fetch it again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from holdfast.client.asynchronous.request_methods import AsyncRequestMethods
from holdfast.client.calls import Document, LogQuery
from holdfast.client.data_frames import to_data_frame
from holdfast.client.job_snapshot import JobSnapshot
from holdfast_service.views.attempts import AttemptView
from holdfast_service.views.comparison import ComparisonView
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.history import EventView, LogLineView, MetricPoint
from holdfast_service.views.incidents import FaultView, IncidentView
from holdfast_service.views.jobs import RemovedJobView
from holdfast_service.views.pages import CheckpointPage


class AsyncClient(AsyncRequestMethods):
    """A connection to one server; close it, or use it as a context manager. For one event loop, or
    one thread.

    `context` names a server of the user's configuration (`holdfast login`), `token` is sent as a
    bearer token. `holdfast.client.address` describes how the server is found by default.
    """

    @property
    def jobs(self) -> AsyncJobs:
        """Jobs as objects: `client.jobs.submit(...)`, `.get(...)`, `.list(...)`."""
        return AsyncJobs(self)


class AsyncJobs:
    """The jobs of a server."""

    def __init__(self, client: AsyncRequestMethods) -> None:
        self._client = client

    async def submit(self, spec: Document, *, idempotency_key: str | None = None) -> AsyncJob:
        """Submit a `JobSpec`, or a mapping with the keys of a YAML spec.

        Raises InvalidSpec with every fault; IdempotencyConflict if the key was used for another
        document. Retries are automatic and never create a second job.
        """
        view = await self._client.submit(spec, idempotency_key=idempotency_key)
        return AsyncJob(self._client, view)

    async def get(self, word: str) -> AsyncJob:
        """A job by its name, its id, or the start or end of it. Raises AmbiguousName,
        JobNotFound."""
        return AsyncJob(self._client, await self._client.get(await self._client.find(word)))

    async def list(
        self, *, state: Collection[str] | None = None, name: str | None = None
    ) -> AsyncIterator[AsyncJob]:
        """The jobs in short, newest first; pages are fetched as they are needed."""
        async for row in self._client.list(state=state, name=name):
            yield AsyncJob(self._client, row)

    __aiter__ = list


class AsyncJob(JobSnapshot):
    """One job of a server."""

    _client: AsyncRequestMethods

    async def refresh(self) -> AsyncJob:
        """Fetch the view again."""
        self.view = await self._client.get(self.id)
        return self

    async def wait(
        self, timeout_s: float | None = None, *, check: bool = False, poll_s: float = 0.5
    ) -> AsyncJob:
        """Wait until the job has ended. Raises WaitTimeout; with `check` also JobFailed."""
        self.view = await self._client.wait(self.id, timeout_s, poll_s)
        if check:
            self.raise_for_state()
        return self

    async def cancel(self, *, now: bool = False) -> AsyncJob:
        """Cancel the job; its last state is saved first, unless `now`. Raises JobEnded."""
        self.view = await self._client.cancel(self.id, now=now)
        return self

    async def pause(self) -> AsyncJob:
        """Pause the job: it saves its state and leaves the cluster. Raises JobEnded."""
        self.view = await self._client.pause(self.id)
        return self

    async def resume(self) -> AsyncJob:
        """Resume the job from its newest checkpoint. Raises JobEnded."""
        self.view = await self._client.resume(self.id)
        return self

    async def restart(self) -> AsyncJob:
        """Continue the job in new processes of the server's build. Raises JobEnded."""
        self.view = await self._client.restart(self.id)
        return self

    async def resize(self, nodes: int | None) -> AsyncJob:
        """Train on at most so many nodes; None: on as many as the spec allows. Raises JobEnded."""
        self.view = await self._client.resize(self.id, nodes)
        return self

    async def set_labels(self, labels: Mapping[str, str | None]) -> AsyncJob:
        """Change labels; None removes one, the others stay. Raises InvalidParameters."""
        self.view = await self._client.set_labels(self.id, labels)
        return self

    async def set_priority(self, priority: int) -> AsyncJob:
        """Change the place in the queue: a higher priority is before a lower one."""
        self.view = await self._client.set_priority(self.id, priority)
        return self

    async def remove(self, *, with_checkpoints: bool = False) -> RemovedJobView:
        """Remove this ended job with its history; its checkpoints stay unless `with_checkpoints`.
        Raises Conflict."""
        return await self._client.remove(self.id, with_checkpoints=with_checkpoints)

    async def replay(self) -> AsyncJob:
        """Submit a replay of the steps so far: undisturbed, on the same meshes. Raises Conflict."""
        return AsyncJob(self._client, await self._client.replay(self.id))

    async def comparison(self) -> ComparisonView:
        """The digests of this replay and of the job that it replays. Raises Conflict."""
        return await self._client.comparison(self.id)

    def events(self, *, follow: bool = False, after: int = 0) -> AsyncIterator[EventView]:
        """The stored events; with `follow` also new ones, until the job has ended."""
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
        """The output of the ranks; with `follow` also new lines, until the job has ended.

        `since` is in Unix seconds, `grep` a regular expression (RE2), `level` the lowest level,
        `tail` the number of last lines. Raises InvalidRegex.
        """
        query = LogQuery(rank, attempt, since, grep, level)
        if follow:
            return self._client.follow_logs(self.id, **asdict(query), tail=tail)
        return self._client.all_logs(self.id, query, tail=tail)

    async def metrics(self, names: Collection[str] | None = None) -> Any:
        """The committed history, a point per step: a pandas DataFrame with the step as index if
        pandas is installed, else a list of `MetricPoint`. Raises UnknownMetric."""
        return to_data_frame([point async for point in self.points(names)])

    def points(
        self, names: Collection[str] | None = None, after_step: int | None = None
    ) -> AsyncIterator[MetricPoint]:
        """The points of `metrics` as plain values; pages are fetched as they are needed."""
        return self._client.metrics(self.id, names, after_step)

    async def incidents(self) -> Sequence[IncidentView]:
        """All incidents, oldest first."""
        return await self._client.incidents(self.id)

    async def attempts(self) -> Sequence[AttemptView]:
        """All attempts, oldest first."""
        return await self._client.attempts(self.id)

    async def goodput(self) -> GoodputView:
        """The account of the job's time, so far or in total."""
        return await self._client.goodput(self.id)

    async def checkpoints(self) -> CheckpointPage:
        """The checkpoints that the job can continue from, by tier."""
        return await self._client.checkpoints(self.id)

    async def digests(self) -> dict[int, str]:
        """Digest of the whole training state after each step."""
        return await self._client.digests(self.id)

    async def inject(self, kind: str, **how: Any) -> FaultView:
        """Inject a fault into the job. Raises InjectionDisabled, InvalidFault."""
        return await self._client.inject(self.id, kind, **how)
