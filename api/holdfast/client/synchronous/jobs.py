# Generated from asynchronous/jobs.py by api/generate_client.py: do not edit.
"""The REST API as Python calls and values (`holdfast.Client`, `holdfast.AsyncClient`), and jobs as
objects.

The methods of a client take ids and return plain values, one method per request. `client.jobs`
returns jobs as objects, which is the easiest way to write programs. A job holds what was fetched
last; `refresh`, `wait` and the methods that change the job fetch it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from holdfast.client.calls import Document, LogQuery
from holdfast.client.data_frames import to_data_frame
from holdfast.client.job_snapshot import JobSnapshot
from holdfast.client.synchronous.request_methods import RequestMethods
from holdfast_service.views.attempts import AttemptView
from holdfast_service.views.comparison import ComparisonView
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.history import EventView, LogLineView, MetricPoint
from holdfast_service.views.incidents import FaultView, IncidentView
from holdfast_service.views.jobs import RemovedJobView
from holdfast_service.views.pages import CheckpointPage


class Client(RequestMethods):
    """A connection to one server; close it, or use it as a context manager. For one event loop, or
    one thread.

    `context` names a server of the user's configuration (`holdfast login`), `token` is sent as a
    bearer token. `holdfast.client.address` describes how the server is found by default.
    """

    @property
    def jobs(self) -> Jobs:
        """Jobs as objects: `client.jobs.submit(...)`, `.get(...)`, `.list(...)`."""
        return Jobs(self)


class Jobs:
    """The jobs of a server."""

    def __init__(self, client: RequestMethods) -> None:
        self._client = client

    def submit(self, spec: Document, *, idempotency_key: str | None = None) -> Job:
        """Submit a `JobSpec`, or a mapping with the keys of a YAML spec.

        Raises InvalidSpec with every fault; IdempotencyConflict if the key was used for another
        document. Retries are automatic and never create a second job.
        """
        view = self._client.submit(spec, idempotency_key=idempotency_key)
        return Job(self._client, view)

    def get(self, word: str) -> Job:
        """A job by its name, its id, or the start or end of it. Raises AmbiguousName,
        JobNotFound."""
        return Job(self._client, self._client.get(self._client.find(word)))

    def list(
        self, *, state: Collection[str] | None = None, name: str | None = None
    ) -> Iterator[Job]:
        """The jobs in short, newest first; pages are fetched as they are needed."""
        for row in self._client.list(state=state, name=name):
            yield Job(self._client, row)

    __iter__ = list


class Job(JobSnapshot):
    """One job of a server."""

    _client: RequestMethods

    def refresh(self) -> Job:
        """Fetch the view again."""
        self.view = self._client.get(self.id)
        return self

    def wait(
        self, timeout_s: float | None = None, *, check: bool = False, poll_s: float = 0.5
    ) -> Job:
        """Wait until the job has ended. Raises WaitTimeout; with `check` also JobFailed."""
        self.view = self._client.wait(self.id, timeout_s, poll_s)
        if check:
            self.raise_for_state()
        return self

    def cancel(self, *, now: bool = False) -> Job:
        """Cancel the job; its last state is saved first, unless `now`. Raises JobEnded."""
        self.view = self._client.cancel(self.id, now=now)
        return self

    def pause(self) -> Job:
        """Pause the job: it saves its state and leaves the cluster. Raises JobEnded."""
        self.view = self._client.pause(self.id)
        return self

    def resume(self) -> Job:
        """Resume the job from its newest checkpoint. Raises JobEnded."""
        self.view = self._client.resume(self.id)
        return self

    def restart(self) -> Job:
        """Continue the job in new processes of the server's build. Raises JobEnded."""
        self.view = self._client.restart(self.id)
        return self

    def resize(self, nodes: int | None) -> Job:
        """Train on at most so many nodes; None: on as many as the spec allows. Raises JobEnded."""
        self.view = self._client.resize(self.id, nodes)
        return self

    def set_labels(self, labels: Mapping[str, str | None]) -> Job:
        """Change labels; None removes one, the others stay. Raises InvalidParameters."""
        self.view = self._client.set_labels(self.id, labels)
        return self

    def set_priority(self, priority: int) -> Job:
        """Change the place in the queue: a higher priority is before a lower one."""
        self.view = self._client.set_priority(self.id, priority)
        return self

    def remove(self, *, with_checkpoints: bool = False) -> RemovedJobView:
        """Remove this ended job with its history; its checkpoints stay unless `with_checkpoints`.
        Raises Conflict."""
        return self._client.remove(self.id, with_checkpoints=with_checkpoints)

    def replay(self) -> Job:
        """Submit a replay of the steps so far: undisturbed, on the same meshes. Raises Conflict."""
        return Job(self._client, self._client.replay(self.id))

    def comparison(self) -> ComparisonView:
        """The digests of this replay and of the job that it replays. Raises Conflict."""
        return self._client.comparison(self.id)

    def events(self, *, follow: bool = False, after: int = 0) -> Iterator[EventView]:
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
    ) -> Iterator[LogLineView]:
        """The output of the ranks; with `follow` also new lines, until the job has ended.

        `since` is in Unix seconds, `grep` a regular expression (RE2), `level` the lowest level,
        `tail` the number of last lines. Raises InvalidRegex.
        """
        query = LogQuery(rank, attempt, since, grep, level)
        if follow:
            return self._client.follow_logs(self.id, **asdict(query), tail=tail)
        return self._client.all_logs(self.id, query, tail=tail)

    def metrics(self, names: Collection[str] | None = None) -> Any:
        """The committed history, a point per step: a pandas DataFrame with the step as index if
        pandas is installed, else a list of `MetricPoint`. Raises UnknownMetric."""
        return to_data_frame(list(self.points(names)))

    def points(
        self, names: Collection[str] | None = None, after_step: int | None = None
    ) -> Iterator[MetricPoint]:
        """The points of `metrics` as plain values; pages are fetched as they are needed."""
        return self._client.metrics(self.id, names, after_step)

    def incidents(self) -> Sequence[IncidentView]:
        """All incidents, oldest first."""
        return self._client.incidents(self.id)

    def attempts(self) -> Sequence[AttemptView]:
        """All attempts, oldest first."""
        return self._client.attempts(self.id)

    def goodput(self) -> GoodputView:
        """The account of the job's time, so far or in total."""
        return self._client.goodput(self.id)

    def checkpoints(self) -> CheckpointPage:
        """The checkpoints that the job can continue from, by tier."""
        return self._client.checkpoints(self.id)

    def digests(self) -> dict[int, str]:
        """Digest of the whole training state after each step."""
        return self._client.digests(self.id)

    def inject(self, kind: str, **how: Any) -> FaultView:
        """Inject a fault into the job. Raises InjectionDisabled, InvalidFault."""
        return self._client.inject(self.id, kind, **how)
