# Generated from asynchronous/request_methods.py by api/generate_client.py: do not edit.
"""The requests of the REST API as methods: ids and values in, values out.

Every method retries for `retry_s` while the server is unreachable. A repetition is safe: a
submission has an idempotency key. Errors are those of `holdfast.errors`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from holdfast.client import address as addresses
from holdfast.client import calls
from holdfast.client import job_names as names
from holdfast.client.calls import (
    JOBS,
    PAGE,
    Call,
    Document,
    LogQuery,
    checkpoint_path,
    job_path,
    node_path,
    plain,
)
from holdfast.client.synchronous.transport import Transport
from holdfast.client.waiting import off_loop, sleep
from holdfast.errors import WaitTimeout, unfinished
from holdfast.formats import code_archive
from holdfast.schemas import Readiness
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.jobs import (
    AttemptView,
    CheckpointsView,
    CheckpointView,
    CodeView,
    EventPage,
    EventView,
    FaultView,
    IncidentView,
    JobPage,
    JobView,
    LogLineView,
    LogPage,
    MetricPoint,
    NodePage,
    NodeView,
    VerificationView,
)
from holdfast_service.views.lists import ClusterView, JobRow, SpecDifferenceView
from holdfast_service.views.ranks import RanksView
from holdfast_service.views.timeline import TimelineView, VerdictView

T = TypeVar("T")


class RequestMethods:
    """One method per request of the REST API, over one connection; for one event loop, or one
    thread."""

    def __init__(
        self,
        address: str | None = None,
        *,
        context: str | None = None,
        token: str | None = None,
        data_dir: Path | None = None,
        timeout_s: float = 30.0,
        retry_s: float = 10.0,
    ) -> None:
        server = addresses.find(address, context=context, data_dir=data_dir, token=token)
        self._transport = Transport(server.address, timeout_s, retry_s, server.token)
        self.server = server

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

    def submit(self, spec: Document, *, idempotency_key: str | None = None) -> JobView:
        """Submit a job; the folder in its `code` is sent first. Raises InvalidSpec with every
        fault; Conflict if the key was used for another document; CodeUnusable."""
        spec = self._with_code(spec)
        headers = _key(idempotency_key)
        return self._send("POST", JOBS, JobView, body=plain(spec), headers=headers)

    def validate(self, spec: Document) -> dict[str, Any]:
        """The resolved spec, with its defaults; creates no job. Raises InvalidSpec."""
        path, body = f"{JOBS}/validate", plain(self._with_code(spec))
        call = Call("POST", path, lambda answer: dict(answer["spec"]), body=body)
        return self._transport.call(call)

    def send_code(self, folder: Path) -> CodeView:
        """Send a folder of code. Can be repeated. Raises CodeUnusable."""
        package = off_loop(code_archive.pack, folder)
        headers = {"Content-Type": "application/zip"}
        path = "/api/v1/code"
        return self._send("POST", path, CodeView, headers=headers, content=package)

    def _with_code(self, spec: Document) -> Document:
        folder = code_archive.folder_of_spec(spec)
        if folder is None:
            return spec
        package = self.send_code(folder)
        return code_archive.with_package(spec, package.code)

    def list(
        self, *, state: Collection[str] | None = None, name: str | None = None
    ) -> Iterator[JobView]:
        """Newest first; pages are fetched as they are needed."""
        return self._transport.pages(calls.jobs(state, name))

    def all_of(self, ids: Sequence[str]) -> Iterator[JobView]:
        """The jobs with these ids, in this order, with few requests; unknown ids are skipped."""
        for start in range(0, len(ids), calls.JOBS_PAGE):
            batch = ids[start : start + calls.JOBS_PAGE]
            page = self._get(JOBS, JobPage, id=list(batch), limit=calls.JOBS_PAGE)
            found = {job.id: job for job in page.jobs}
            for job_id in batch:
                if job_id in found:
                    yield found[job_id]

    def find(self, word: str) -> str:
        """The id of a job, given its name, its id, or the start of its id.

        Raises AmbiguousName, JobNotFound; a complete id is not looked up.
        """
        if names.is_id(word):
            return word
        rows = self._transport.pages(calls.rows(word, None, None, None))
        return names.resolve(word, list(rows)).id

    def rows(
        self,
        q: str | None = None,
        *,
        state: Collection[str] | None = None,
        owner: str | None = None,
        sort: str | None = None,
    ) -> Iterator[JobRow]:
        """Jobs as rows of a list, which is fast with any number of jobs; `q`: part of a name or
        owner, or the start of an id. `sort`: created, name, state or goodput."""
        return self._transport.pages(calls.rows(q, state, owner, sort))

    def get(self, job_id: str) -> JobView:
        return self._get(job_path(job_id), JobView)

    def cancel(self, job_id: str, *, now: bool = False) -> JobView:
        """Cancel a job; its last state is saved first, unless `now`.

        Raises Conflict if the job has ended in another way.
        """
        params = {"now": True} if now else None
        return self._send("POST", job_path(job_id, "/cancel"), JobView, params=params)

    def pause(self, job_id: str) -> JobView:
        """Let a job save its state and leave the cluster. Raises Conflict if it has ended."""
        return self._send("POST", job_path(job_id, "/pause"), JobView)

    def resume(self, job_id: str) -> JobView:
        """Resume a paused job from its newest checkpoint. Raises Conflict if it has ended."""
        return self._send("POST", job_path(job_id, "/resume"), JobView)

    def resize(self, job_id: str, nodes: int | None) -> JobView:
        """Train an elastic job on at most so many nodes; None: on as many as its spec allows.

        Raises InvalidParameters if its range of nodes does not allow it, Conflict if it has ended.
        """
        params = None if nodes is None else {"nodes": nodes}
        return self._send("POST", job_path(job_id, "/resize"), JobView, params=params)

    def wait(self, job_id: str, timeout_s: float | None = None, poll_s: float = 0.5) -> JobView:
        """Wait until the job has ended, with any result. Raises WaitTimeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            job = self.get(job_id)
            if job.state.terminal:
                return job
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"job {job_id} is {job.state.value} after {timeout_s:g} s")
            sleep(poll_s)

    def attempts(self, job_id: str) -> Sequence[AttemptView]:
        """Oldest first."""
        return self._get(job_path(job_id, "/attempts"), list[AttemptView])

    def incidents(self, job_id: str) -> Sequence[IncidentView]:
        """Oldest first."""
        return self._get(job_path(job_id, "/incidents"), list[IncidentView])

    def inject(
        self, job_id: str, kind: str, *, idempotency_key: str | None = None, **how: Any
    ) -> FaultView:
        """Inject a fault into a job; `how`: rank, at_step, phase and the settings of the kind.

        Raises InjectionDisabled if the server does not allow it.
        """
        body, headers = {"kind": str(kind), **how}, _key(idempotency_key)
        path = job_path(job_id, "/faults")
        return self._send("POST", path, FaultView, body=body, headers=headers)

    def faults(self, job_id: str) -> Sequence[FaultView]:
        """The injected faults, oldest first."""
        return self._get(job_path(job_id, "/faults"), list[FaultView])

    def goodput(self, job_id: str) -> GoodputView:
        """The account of the job's time, so far or in total."""
        return self._get(job_path(job_id, "/goodput"), GoodputView)

    def verdict(self, job_id: str) -> VerdictView:
        """The state in plain sentences: the present activity, the last event, the next step."""
        return self._get(job_path(job_id, "/verdict"), VerdictView)

    def timeline(self, job_id: str) -> TimelineView:
        """The use of every moment of the job's time."""
        return self._get(job_path(job_id, "/timeline"), TimelineView)

    def ranks(self, job_id: str) -> RanksView:
        """The ranks of the newest attempt, as last seen."""
        return self._get(job_path(job_id, "/ranks"), RanksView)

    def difference(self, job_id: str, against: str) -> Sequence[SpecDifferenceView]:
        """The differences between the resolved specs of two jobs."""
        path = job_path(job_id, "/spec/diff")
        return self._get(path, list[SpecDifferenceView], against=against)

    def cluster(self) -> ClusterView:
        """Nodes, queue and capacity."""
        return self._get("/api/v1/cluster", ClusterView)

    def checkpoints(self, job_id: str) -> CheckpointsView:
        """The checkpoints that the job can continue from, by tier."""
        return self._get(job_path(job_id, "/checkpoints"), CheckpointsView)

    def verify_checkpoint(self, job_id: str, step: int) -> Iterator[VerificationView]:
        """Verify every byte of a checkpoint; yields the progress. The last item has `done`.

        Raises ServerError if it could not be finished, ServerUnreachable if the connection broke.
        """
        done = False
        path = checkpoint_path(job_id, step, "/verify")
        for line in self._transport.lines("POST", path):
            progress = VerificationView.model_validate_json(line)
            if progress.problem is not None:
                raise unfinished(progress.problem)
            yield progress
            done = progress.done
        if not done:
            raise unfinished("the server's answer was cut off")

    def pin_checkpoint(self, job_id: str, step: int) -> CheckpointView:
        """Protect a checkpoint from removal. Can be repeated."""
        return self._send("PUT", checkpoint_path(job_id, step, "/pin"), CheckpointView)

    def unpin_checkpoint(self, job_id: str, step: int) -> CheckpointView:
        return self._send("DELETE", checkpoint_path(job_id, step, "/pin"), CheckpointView)

    def remove_checkpoint(self, job_id: str, step: int) -> None:
        """Raises Conflict if the checkpoint is pinned, needed, or the only one of a job."""
        self._send("DELETE", checkpoint_path(job_id, step), type(None))

    def export_checkpoint(
        self,
        job_id: str,
        step: int,
        target: Path,
        *,
        hugging_face: bool = False,
        on_bytes: Callable[[int, int], None] = lambda _written, _whole: None,
    ) -> int:
        """Write the model's parameters to `target`, as safetensors; returns the size in bytes.

        The server verifies every byte first, which can take a while. `target` appears whole or not
        at all. `on_bytes` receives the bytes written and the total.
        """
        path = checkpoint_path(job_id, step, "/export")
        params = {"format": "safetensors", "names": "hf" if hugging_face else "own"}
        return self._transport.download(path, params, target, on_bytes)

    def nodes(self) -> Sequence[NodeView]:
        """All nodes that were ever seen, present nodes first."""
        return (self._get(calls.NODES, NodePage)).nodes

    def node(self, name: str) -> NodeView:
        """A node by its name, or the start of the name."""
        return self._get(node_path(name), NodeView)

    def cordon(self, name: str, reason: str, *, until: float | None = None) -> NodeView:
        """Place no new rank on a node, until a time (Unix seconds) or until `uncordon`."""
        body = {"reason": reason, "until": until}
        return self._send("POST", node_path(name, "/cordon"), NodeView, body=body)

    def uncordon(self, name: str) -> NodeView:
        """End the cordon or quarantine of a node. Can be repeated."""
        return self._send("POST", node_path(name, "/uncordon"), NodeView)

    def events(self, job_id: str, after: int = 0, limit: int = 200) -> EventPage:
        """One page of events."""
        return self._transport.call(calls.events(job_id, after, limit))

    def all_events(self, job_id: str, after: int = 0) -> Iterator[EventView]:
        """The stored events; pages are fetched as they are needed."""
        return self._transport.pages(calls.all_events(job_id, after))

    def follow(self, job_id: str, after: int = 0) -> Iterator[EventView]:
        """Events as they occur, until the job has ended; resumes after a broken connection."""
        return self._transport.follow(calls.event_feed(job_id, after))

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
        """One page of the ranks' output."""
        wanted = LogQuery(rank=rank, attempt=attempt)
        return self._transport.call(calls.logs(job_id, wanted, after, limit, tail))

    def all_logs(
        self, job_id: str, wanted: LogQuery | None = None, *, tail: int | None = None
    ) -> Iterator[LogLineView]:
        """The stored lines, or the last `tail`; pages are fetched as they are needed."""
        return self._transport.pages(calls.all_logs(job_id, wanted or LogQuery(), tail=tail))

    def follow_logs(
        self,
        job_id: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        since: float | None = None,
        grep: str | None = None,
        level: str | None = None,
        after: int = 0,
        tail: int | None = None,
    ) -> Iterator[LogLineView]:
        """Lines as they are written, until the job has ended; resumes after a broken connection."""
        wanted = LogQuery(rank, attempt, since, grep, level)
        return self._transport.follow(calls.log_feed(job_id, wanted, after, tail))

    def metrics(
        self, job_id: str, names: Collection[str] | None = None, after_step: int = 0
    ) -> Iterator[MetricPoint]:
        """One point per committed step; pages are fetched as they are needed."""
        return self._transport.pages(calls.metrics(job_id, names, after_step))

    def thinned_metrics(
        self, job_id: str, names: Collection[str] | None = None, *, most: int
    ) -> Sequence[MetricPoint]:
        """The whole series in at most `most` points, always including the last one."""
        page = self._transport.call(calls.thinned_metrics(job_id, names, most))
        return page.points

    def digests(self, job_id: str) -> dict[int, str]:
        """Digest of the whole state after each step."""
        pages = self._transport.pages(calls.digests(job_id))
        return dict(pages)

    def ready(self) -> Readiness:
        """Raises ServerError if a part of the control plane is not ready."""
        return self._get("/readyz", Readiness)

    def _get(self, path: str, answer: type[T], **params: Any) -> T:
        return self._transport.call(calls.get(path, answer, **params))

    def _send(self, method: str, path: str, answer: type[T], **parts: Any) -> T:
        """`parts`: the other fields of the `Call`."""
        return self._transport.call(calls.call(method, path, answer, **parts))


def _key(given: str | None) -> dict[str, str]:
    return {"Idempotency-Key": given or str(uuid.uuid4())}
