"""The requests of the REST API as methods: ids and values in, values out.

Every method retries while the server cannot be reached, for `retry_s`. Repeating is safe: a
submission carries an idempotency key. Errors are those of `holdfast.errors`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.client import address as addresses
from holdfast.client import calls
from holdfast.client import job_names as names
from holdfast.client.calls import PAGE, Document, LogFilter
from holdfast.client.transport import Transport
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
    JobView,
    LogLineView,
    LogPage,
    MetricPoint,
    NodeView,
    VerificationView,
)
from holdfast_service.views.lists import ClusterView, JobRow, SpecDifferenceView
from holdfast_service.views.ranks import RanksView
from holdfast_service.views.timeline import TimelineView, VerdictView


class RequestMethods:
    """One method per request of the REST API, over one connection; not safe across threads."""

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
        """Submit a job; a folder that it names as `code` is sent before. Raises InvalidSpec with
        every fault; Conflict for a key used otherwise; CodeUnusable."""
        return self._transport.call(calls.submit(self._with_code(spec), idempotency_key))

    def validate(self, spec: Document) -> dict[str, Any]:
        """What a spec resolves to, its defaults filled in; makes nothing. Raises InvalidSpec."""
        return self._transport.call(calls.validate(self._with_code(spec)))

    def send_code(self, folder: Path) -> CodeView:
        """Send a folder of code; again is the same. Raises CodeUnusable."""
        return self._transport.call(calls.send_code(code_archive.packed(folder)))

    def _with_code(self, spec: Document) -> Document:
        folder = code_archive.named(spec)
        return spec if folder is None else code_archive.naming(spec, self.send_code(folder).code)

    def list(
        self, *, state: Collection[str] | None = None, name: str | None = None
    ) -> Iterator[JobView]:
        """Newest first; pages are fetched as they are needed."""
        return self._transport.pages(calls.jobs(state, name))

    def all_of(self, ids: Sequence[str]) -> Iterator[JobView]:
        """The jobs with these ids, in this order, by few requests; what is none is left out."""
        for start in range(0, len(ids), calls.JOBS_PAGE):
            some = ids[start : start + calls.JOBS_PAGE]
            found = {job.id: job for job in self._transport.call(calls.jobs_of(some)).jobs}
            yield from (found[item] for item in some if item in found)

    def find(self, word: str) -> str:
        """The id of the job that `word` means: its name, its id, or the beginning of the id.

        Raises AmbiguousName, JobNotFound; an id that is complete is not looked up.
        """
        if names.is_id(word):
            return word
        return names.chosen(word, self._transport.pages(calls.rows(word, None, None, None))).id

    def rows(
        self,
        q: str | None = None,
        *,
        state: Collection[str] | None = None,
        owner: str | None = None,
        sort: str | None = None,
    ) -> Iterator[JobRow]:
        """Jobs as lines of a list, which is quick with any number of them; `q`: part of a name or
        owner, or the beginning of an id. `sort`: created, name, state or goodput."""
        return self._transport.pages(calls.rows(q, state, owner, sort))

    def get(self, job_id: str) -> JobView:
        return self._transport.call(calls.job(job_id))

    def cancel(self, job_id: str, *, now: bool = False) -> JobView:
        """Ask for the end of a job; its last state is saved before, unless `now`.

        Raises Conflict if it ended otherwise.
        """
        return self._transport.call(calls.cancel(job_id, now))

    def pause(self, job_id: str) -> JobView:
        """Ask a job to save its state and leave the cluster. Raises Conflict if it has ended."""
        return self._transport.call(calls.pause(job_id))

    def resume(self, job_id: str) -> JobView:
        """Let a paused job go on from its newest checkpoint. Raises Conflict if it has ended."""
        return self._transport.call(calls.resume(job_id))

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
        return self._transport.call(calls.attempts(job_id))

    def incidents(self, job_id: str) -> Sequence[IncidentView]:
        """Oldest first."""
        return self._transport.call(calls.incidents(job_id))

    def inject(
        self, job_id: str, kind: str, *, idempotency_key: str | None = None, **how: Any
    ) -> FaultView:
        """Break something of a job on purpose; `how`: rank, at_step, phase and what the kind takes.

        Raises InjectionDisabled where the server does not allow it.
        """
        return self._transport.call(calls.inject(job_id, kind, idempotency_key, how))

    def faults(self, job_id: str) -> Sequence[FaultView]:
        """Those that were injected, oldest first."""
        return self._transport.call(calls.faults(job_id))

    def goodput(self, job_id: str) -> GoodputView:
        """Where the job's time went, so far or in all."""
        return self._transport.call(calls.goodput(job_id))

    def verdict(self, job_id: str) -> VerdictView:
        """How it stands, in plain words: what it does, what happened last, what comes next."""
        return self._transport.call(calls.verdict(job_id))

    def timeline(self, job_id: str) -> TimelineView:
        """What every moment of its life went into."""
        return self._transport.call(calls.timeline(job_id))

    def ranks(self, job_id: str) -> RanksView:
        """The ranks of its newest attempt, as they were last seen."""
        return self._transport.call(calls.ranks(job_id))

    def difference(self, job_id: str, against: str) -> Sequence[SpecDifferenceView]:
        """Where the resolved specs of two jobs differ."""
        return self._transport.call(calls.difference(job_id, against))

    def cluster(self) -> ClusterView:
        """Nodes, queue and capacity at a glance."""
        return self._transport.call(calls.cluster())

    def checkpoints(self, job_id: str) -> CheckpointsView:
        """What the job can go on from, by tier."""
        return self._transport.call(calls.checkpoints(job_id))

    def verify_checkpoint(self, job_id: str, step: int) -> Iterator[VerificationView]:
        """Have every byte read; how far it is, as it comes. The last word has `done`.

        Raises ServerError if it could not be finished, ServerUnreachable if it was cut off.
        """
        done = False
        for line in self._transport.lines(*calls.verification(job_id, step)):
            word = calls.verified(line)
            yield word
            done = word.done
        if not done:
            raise unfinished("the server's answer was cut off")

    def pin_checkpoint(self, job_id: str, step: int) -> CheckpointView:
        """Let nobody remove it; again is the same."""
        return self._transport.call(calls.pin(job_id, step))

    def unpin_checkpoint(self, job_id: str, step: int) -> CheckpointView:
        return self._transport.call(calls.unpin(job_id, step))

    def remove_checkpoint(self, job_id: str, step: int) -> None:
        """Raises Conflict for one that is pinned, needed, or all that a job has."""
        self._transport.call(calls.remove_checkpoint(job_id, step))

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
        path, params = calls.export(job_id, step, hugging_face)
        return self._transport.download(path, params, target, on_bytes)

    def nodes(self) -> Sequence[NodeView]:
        """Every node that was ever seen, those that are there first."""
        return self._transport.call(calls.nodes())

    def node(self, name: str) -> NodeView:
        """By its name, or the beginning of it."""
        return self._transport.call(calls.node(name))

    def cordon(self, name: str, reason: str, *, until: float | None = None) -> NodeView:
        """Let no new rank be seated there, until a time (Unix seconds) or until it is lifted."""
        return self._transport.call(calls.cordon(name, reason, until))

    def uncordon(self, name: str) -> NodeView:
        """Take it back, whoever had set it aside; again is the same."""
        return self._transport.call(calls.uncordon(name))

    def events(self, job_id: str, after: int = 0, limit: int = 200) -> EventPage:
        """One page of them."""
        return self._transport.call(calls.events(job_id, after, limit))

    def all_events(self, job_id: str, after: int = 0) -> Iterator[EventView]:
        """Those that there are; pages are fetched as they are needed."""
        return self._transport.pages(calls.all_events(job_id, after))

    def follow(self, job_id: str, after: int = 0) -> Iterator[EventView]:
        """Events as they come, until the job is over; resumes where a connection broke."""
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
        """One page of what the ranks wrote."""
        wanted = LogFilter(rank=rank, attempt=attempt)
        return self._transport.call(calls.logs(job_id, wanted, after, limit, tail))

    def all_logs(
        self, job_id: str, wanted: LogFilter | None = None, *, tail: int | None = None
    ) -> Iterator[LogLineView]:
        """The lines that there are, or the last `tail`; pages are fetched as they are needed."""
        return self._transport.pages(calls.all_logs(job_id, wanted or LogFilter(), tail=tail))

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
        """Lines as they come, until the job is over; resumes where a connection broke."""
        wanted = LogFilter(rank, attempt, since, grep, level)
        return self._transport.follow(calls.log_feed(job_id, wanted, after, tail))

    def metrics(
        self, job_id: str, names: Collection[str] | None = None, after_step: int = 0
    ) -> Iterator[MetricPoint]:
        """One point per committed step; pages are fetched as they are needed."""
        return self._transport.pages(calls.metrics(job_id, names, after_step))

    def thinned_metrics(
        self, job_id: str, names: Collection[str] | None = None, *, most: int
    ) -> Sequence[MetricPoint]:
        """The whole series in at most so many points, the last one always among them."""
        return self._transport.call(calls.thinned_metrics(job_id, names, most)).points

    def digests(self, job_id: str) -> dict[int, str]:
        """Digest of the whole state after each step."""
        return dict(self._transport.pages(calls.digests(job_id)))

    def ready(self) -> Readiness:
        """Raises ServerError if a part of the control plane is not well."""
        return self._transport.call(calls.ready())
