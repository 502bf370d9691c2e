"""`holdfast.Client`: what the REST API offers, as Python calls and values.

Every call retries while the server cannot be reached, for `retry_s`: all of them may be repeated
(a submission carries an idempotency key). Errors are those of `holdfast.errors`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from pydantic import TypeAdapter

from holdfast.client import address as addresses
from holdfast.client.transport import Transport
from holdfast.errors import WaitTimeout
from holdfast.schemas import Readiness
from holdfast_service.views import (
    AttemptView,
    CheckpointView,
    DigestPage,
    EventPage,
    EventView,
    IncidentView,
    JobPage,
    JobView,
    LogLineView,
    LogPage,
    MetricPage,
    MetricPoint,
)

PAGE = 1000
_ATTEMPTS = TypeAdapter(list[AttemptView])
_INCIDENTS = TypeAdapter(list[IncidentView])
_CHECKPOINTS = TypeAdapter(list[CheckpointView])


class Client:
    """A connection to one server; close it, or use it in a `with` statement. One thread each."""

    def __init__(
        self,
        address: str | None = None,
        *,
        data_dir: Path | None = None,
        timeout_s: float = 30.0,
        retry_s: float = 10.0,
    ) -> None:
        self._transport = Transport(addresses.resolve(address, data_dir), timeout_s, retry_s)

    @property
    def address(self) -> str:
        return self._transport.address

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def submit(self, spec: Mapping[str, Any], *, idempotency_key: str | None = None) -> JobView:
        """Submit a job. Raises InvalidSpec with every fault; Conflict for a key used otherwise."""
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        return JobView.model_validate(
            self._transport.call("POST", "/api/v1/jobs", body=dict(spec), headers=headers)
        )

    def list(
        self, *, state: Collection[str] | None = None, name: str | None = None
    ) -> Iterator[JobView]:
        """Newest first; pages are fetched as they are needed."""
        cursor: str | None = None
        while True:
            params = {"cursor": cursor, "state": list(state) if state else None, "name": name}
            page = JobPage.model_validate(
                self._transport.call("GET", "/api/v1/jobs", params=params)
            )
            yield from page.jobs
            cursor = page.next_cursor
            if cursor is None:
                return

    def get(self, job_id: str) -> JobView:
        return JobView.model_validate(self._get(job_id))

    def cancel(self, job_id: str) -> JobView:
        """Ask for the end of a job. Raises Conflict if it ended otherwise."""
        return JobView.model_validate(self._transport.call("POST", _path(job_id, "/cancel")))

    def wait(self, job_id: str, timeout_s: float | None = None, poll_s: float = 0.5) -> JobView:
        """The job once it has ended, however it did. Raises WaitTimeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            job = self.get(job_id)
            if job.state.terminal:
                return job
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"job {job_id} is {job.state.value} after {timeout_s:g} s")
            time.sleep(poll_s)

    def attempts(self, job_id: str) -> Sequence[AttemptView]:
        """Oldest first."""
        return _ATTEMPTS.validate_python(self._get(job_id, "/attempts"))

    def incidents(self, job_id: str) -> Sequence[IncidentView]:
        """Oldest first."""
        return _INCIDENTS.validate_python(self._get(job_id, "/incidents"))

    def checkpoints(self, job_id: str) -> Sequence[CheckpointView]:
        """Newest step first."""
        return _CHECKPOINTS.validate_python(self._get(job_id, "/checkpoints"))

    def events(self, job_id: str, after: int = 0, limit: int = 200) -> EventPage:
        params = {"after": after, "limit": limit}
        return EventPage.model_validate(self._get(job_id, "/events", params))

    def follow(self, job_id: str, after: int = 0) -> Iterator[EventView]:
        """Events as they come, until the job is over; resumes where a connection broke."""
        for message in self._transport.stream(_path(job_id, "/events"), after):
            yield EventView.model_validate_json(message.payload)

    def logs(
        self,
        job_id: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        after: int = 0,
        limit: int = PAGE,
        tail: int | None = None,
    ) -> LogPage:
        params = {"rank": rank, "attempt": attempt, "after": after, "limit": limit, "tail": tail}
        return LogPage.model_validate(self._get(job_id, "/logs", params))

    def follow_logs(
        self,
        job_id: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        after: int = 0,
        tail: int | None = None,
    ) -> Iterator[LogLineView]:
        """Lines as they come, until the job is over."""
        params = {"rank": rank, "attempt": attempt, "tail": tail}
        for message in self._transport.stream(_path(job_id, "/logs"), after, params):
            yield LogLineView.model_validate_json(message.payload)

    def metrics(
        self, job_id: str, names: Collection[str] | None = None, after_step: int = 0
    ) -> Iterator[MetricPoint]:
        """One point per committed step; pages are fetched as they are needed."""
        while True:
            params = {
                "name": list(names) if names else None,
                "after_step": after_step,
                "limit": PAGE,
            }
            page = MetricPage.model_validate(self._get(job_id, "/metrics", params))
            yield from page.points
            if not page.more:
                return
            after_step = page.last_step

    def digests(self, job_id: str) -> dict[int, str]:
        """Digest of the whole state after each step."""
        found: dict[int, str] = {}
        after_step = 0
        while True:
            page = DigestPage.model_validate(
                self._get(job_id, "/digests", {"after_step": after_step})
            )
            found |= page.digests
            if not page.more:
                return found
            after_step = page.last_step

    def ready(self) -> Readiness:
        """Raises ServerError if a part of the control plane is not well."""
        return Readiness.model_validate(self._transport.call("GET", "/readyz"))

    def _get(self, job_id: str, what: str = "", params: dict[str, Any] | None = None) -> Any:
        return self._transport.call("GET", _path(job_id, what), params=params)


def _path(job_id: str, what: str) -> str:
    return f"/api/v1/jobs/{quote(job_id, safe='')}{what}"
