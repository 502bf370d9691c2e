"""`holdfast.Client`: what the REST API offers, as Python calls and values.

Every call retries while the server cannot be reached, for `retry_s`: all of them may be repeated
(a submission carries an idempotency key). Errors are those of `holdfast.errors`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from pydantic import TypeAdapter

from holdfast.client import address as addresses
from holdfast.client.transport import Transport
from holdfast.errors import WaitTimeout, unfinished
from holdfast.schemas import Readiness
from holdfast_service.goodput_view import GoodputView
from holdfast_service.views import (
    AttemptView,
    CheckpointsView,
    CheckpointView,
    DigestPage,
    EventPage,
    EventView,
    FaultView,
    IncidentView,
    JobPage,
    JobView,
    LogLineView,
    LogPage,
    MetricPage,
    MetricPoint,
    NodePage,
    NodeView,
    VerificationView,
)

PAGE = 1000
NODES = "/api/v1/nodes"
_ATTEMPTS = TypeAdapter(list[AttemptView])
_FAULTS = TypeAdapter(list[FaultView])
_INCIDENTS = TypeAdapter(list[IncidentView])


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

    def cancel(self, job_id: str, *, now: bool = False) -> JobView:
        """Ask for the end of a job; its last state is saved before, unless `now`.

        Raises Conflict if it ended otherwise.
        """
        params = {"now": True} if now else None
        return JobView.model_validate(
            self._transport.call("POST", _path(job_id, "/cancel"), params=params)
        )

    def pause(self, job_id: str) -> JobView:
        """Ask a job to save its state and leave the cluster. Raises Conflict if it has ended."""
        return JobView.model_validate(self._transport.call("POST", _path(job_id, "/pause")))

    def resume(self, job_id: str) -> JobView:
        """Let a paused job go on from its newest checkpoint. Raises Conflict if it has ended."""
        return JobView.model_validate(self._transport.call("POST", _path(job_id, "/resume")))

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

    def inject(
        self, job_id: str, kind: str, *, idempotency_key: str | None = None, **how: Any
    ) -> FaultView:
        """Break something of a job on purpose; `how`: rank, at_step, phase and what the kind takes.

        Raises ApiError with the code `injection_disabled` where the server does not allow it.
        """
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        body = {"kind": str(kind), **how}
        path = _path(job_id, "/faults")
        return FaultView.model_validate(
            self._transport.call("POST", path, body=body, headers=headers)
        )

    def faults(self, job_id: str) -> Sequence[FaultView]:
        """Those that were injected, oldest first."""
        return _FAULTS.validate_python(self._get(job_id, "/faults"))

    def goodput(self, job_id: str) -> GoodputView:
        """Where the job's time went, so far or in all."""
        return GoodputView.model_validate(self._get(job_id, "/goodput"))

    def checkpoints(self, job_id: str) -> CheckpointsView:
        """What the job can go on from, by tier."""
        return CheckpointsView.model_validate(self._get(job_id, "/checkpoints"))

    def verify_checkpoint(self, job_id: str, step: int) -> Iterator[VerificationView]:
        """Have every byte read; how far it is, as it comes. The last word has `done`.

        Raises ServerError if it could not be finished, ServerUnreachable if it was cut off.
        """
        path = _path(job_id, f"/checkpoints/{step}/verify")
        done = False
        for line in self._transport.lines("POST", path):
            word = VerificationView.model_validate_json(line)
            if word.problem is not None:
                raise unfinished(word.problem)
            yield word
            done = word.done
        if not done:
            raise unfinished("the server's answer was cut off")

    def pin_checkpoint(self, job_id: str, step: int) -> CheckpointView:
        """Let nobody remove it; again is the same."""
        path = _path(job_id, f"/checkpoints/{step}/pin")
        return CheckpointView.model_validate(self._transport.call("PUT", path))

    def unpin_checkpoint(self, job_id: str, step: int) -> CheckpointView:
        path = _path(job_id, f"/checkpoints/{step}/pin")
        return CheckpointView.model_validate(self._transport.call("DELETE", path))

    def remove_checkpoint(self, job_id: str, step: int) -> None:
        """Raises Conflict for one that is pinned, needed, or all that a job has."""
        self._transport.call("DELETE", _path(job_id, f"/checkpoints/{step}"))

    def export_checkpoint(
        self,
        job_id: str,
        step: int,
        target: Path,
        *,
        hugging_face: bool = False,
        on_bytes: Callable[[int, int], None] = lambda _written, _whole: None,
    ) -> int:
        """Write the model's parameters to `target`, as safetensors; its size in bytes.

        The server verifies every byte first, which takes its time. `target` appears whole or not
        at all. `on_bytes` is told the bytes written, and of how many.
        """
        params = {"format": "safetensors", "names": "hf" if hugging_face else "own"}
        path = _path(job_id, f"/checkpoints/{step}/export")
        return self._transport.download(path, params, target, on_bytes)

    def nodes(self) -> Sequence[NodeView]:
        """Every node that was ever seen, those that are there first."""
        return NodePage.model_validate(self._transport.call("GET", NODES)).nodes

    def node(self, name: str) -> NodeView:
        """By its name, or the beginning of it."""
        return NodeView.model_validate(self._transport.call("GET", _node(name)))

    def cordon(self, name: str, reason: str, *, until: float | None = None) -> NodeView:
        """Let no new rank be seated there, until a time (Unix seconds) or until it is lifted."""
        body = {"reason": reason, "until": until}
        return NodeView.model_validate(
            self._transport.call("POST", _node(name, "/cordon"), body=body)
        )

    def uncordon(self, name: str) -> NodeView:
        """Take it back, whoever had set it aside; again is the same."""
        return NodeView.model_validate(self._transport.call("POST", _node(name, "/uncordon")))

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


def _node(name: str, what: str = "") -> str:
    return f"{NODES}/{quote(name, safe='')}{what}"
