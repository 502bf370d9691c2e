"""The requests of the REST API as coroutines: ids and values in, values out.

A request with one answer is awaited; a request with many is iterated with `async for`. Both send
the same `calls` values as the synchronous client. Errors are those of `holdfast.errors`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.client import address as addresses
from holdfast.client import calls
from holdfast.client import job_names as names
from holdfast.client.async_transport import AsyncTransport
from holdfast.client.calls import PAGE, Document, LogFilter
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


class AsyncRequestMethods:
    """One coroutine per request of the REST API, over one connection and one event loop."""

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
        self._transport = AsyncTransport(server.address, timeout_s, retry_s, server.token)
        self.server = server

    @property
    def address(self) -> str:
        return self._transport.address

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def submit(self, spec: Document, *, idempotency_key: str | None = None) -> JobView:
        """Submit a job; a folder that it names as `code` is sent before. Raises InvalidSpec with
        every fault; Conflict for a key used otherwise; CodeUnusable."""
        spec = await self._with_code(spec)
        return await self._transport.call(calls.submit(spec, idempotency_key))

    async def validate(self, spec: Document) -> dict[str, Any]:
        """What a spec resolves to, its defaults filled in; makes nothing. Raises InvalidSpec."""
        return await self._transport.call(calls.validate(await self._with_code(spec)))

    async def send_code(self, folder: Path) -> CodeView:
        """Send a folder of code; again is the same. Raises CodeUnusable."""
        package = await asyncio.to_thread(code_archive.packed, folder)
        return await self._transport.call(calls.send_code(package))

    async def _with_code(self, spec: Document) -> Document:
        folder = code_archive.named(spec)
        return (
            spec
            if folder is None
            else code_archive.naming(spec, (await self.send_code(folder)).code)
        )

    def list(
        self, *, state: Collection[str] | None = None, name: str | None = None
    ) -> AsyncIterator[JobView]:
        """Newest first; pages are fetched as they are needed."""
        return self._transport.pages(calls.jobs(state, name))

    async def all_of(self, ids: Sequence[str]) -> AsyncIterator[JobView]:
        """The jobs with these ids, in this order, by few requests; what is none is left out."""
        for start in range(0, len(ids), calls.JOBS_PAGE):
            some = ids[start : start + calls.JOBS_PAGE]
            page = await self._transport.call(calls.jobs_of(some))
            found = {job.id: job for job in page.jobs}
            for item in some:
                if item in found:
                    yield found[item]

    async def find(self, word: str) -> str:
        """The id of the job that `word` means: its name, its id, or the beginning of the id.

        Raises AmbiguousName, JobNotFound; an id that is complete is not looked up.
        """
        if names.is_id(word):
            return word
        fitting = [page async for page in self._transport.pages(calls.rows(word, None, None, None))]
        return names.chosen(word, fitting).id

    def rows(
        self,
        q: str | None = None,
        *,
        state: Collection[str] | None = None,
        owner: str | None = None,
        sort: str | None = None,
    ) -> AsyncIterator[JobRow]:
        """Jobs as lines of a list, which is quick with any number of them; `q`: part of a name or
        owner, or the beginning of an id. `sort`: created, name, state or goodput."""
        return self._transport.pages(calls.rows(q, state, owner, sort))

    async def get(self, job_id: str) -> JobView:
        return await self._transport.call(calls.job(job_id))

    async def cancel(self, job_id: str, *, now: bool = False) -> JobView:
        """Ask for the end of a job; its last state is saved before, unless `now`.

        Raises Conflict if it ended otherwise.
        """
        return await self._transport.call(calls.cancel(job_id, now))

    async def pause(self, job_id: str) -> JobView:
        """Ask a job to save its state and leave the cluster. Raises Conflict if it has ended."""
        return await self._transport.call(calls.pause(job_id))

    async def resume(self, job_id: str) -> JobView:
        """Let a paused job go on from its newest checkpoint. Raises Conflict if it has ended."""
        return await self._transport.call(calls.resume(job_id))

    async def wait(
        self, job_id: str, timeout_s: float | None = None, poll_s: float = 0.5
    ) -> JobView:
        """The job once it has ended, however it did. Raises WaitTimeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            job = await self.get(job_id)
            if job.state.terminal:
                return job
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"job {job_id} is {job.state.value} after {timeout_s:g} s")
            await asyncio.sleep(poll_s)

    async def attempts(self, job_id: str) -> Sequence[AttemptView]:
        """Oldest first."""
        return await self._transport.call(calls.attempts(job_id))

    async def incidents(self, job_id: str) -> Sequence[IncidentView]:
        """Oldest first."""
        return await self._transport.call(calls.incidents(job_id))

    async def inject(
        self, job_id: str, kind: str, *, idempotency_key: str | None = None, **how: Any
    ) -> FaultView:
        """Break something of a job on purpose; `how`: rank, at_step, phase and what the kind takes.

        Raises InjectionDisabled where the server does not allow it.
        """
        return await self._transport.call(calls.inject(job_id, kind, idempotency_key, how))

    async def faults(self, job_id: str) -> Sequence[FaultView]:
        """Those that were injected, oldest first."""
        return await self._transport.call(calls.faults(job_id))

    async def goodput(self, job_id: str) -> GoodputView:
        """Where the job's time went, so far or in all."""
        return await self._transport.call(calls.goodput(job_id))

    async def verdict(self, job_id: str) -> VerdictView:
        """How it stands, in plain words: what it does, what happened last, what comes next."""
        return await self._transport.call(calls.verdict(job_id))

    async def timeline(self, job_id: str) -> TimelineView:
        """What every moment of its life went into."""
        return await self._transport.call(calls.timeline(job_id))

    async def ranks(self, job_id: str) -> RanksView:
        """The ranks of its newest attempt, as they were last seen."""
        return await self._transport.call(calls.ranks(job_id))

    async def difference(self, job_id: str, against: str) -> Sequence[SpecDifferenceView]:
        """Where the resolved specs of two jobs differ."""
        return await self._transport.call(calls.difference(job_id, against))

    async def cluster(self) -> ClusterView:
        """Nodes, queue and capacity at a glance."""
        return await self._transport.call(calls.cluster())

    async def checkpoints(self, job_id: str) -> CheckpointsView:
        """What the job can go on from, by tier."""
        return await self._transport.call(calls.checkpoints(job_id))

    async def verify_checkpoint(self, job_id: str, step: int) -> AsyncIterator[VerificationView]:
        """Have every byte read; how far it is, as it comes. The last word has `done`.

        Raises ServerError if it could not be finished, ServerUnreachable if it was cut off.
        """
        done = False
        async for line in self._transport.lines(*calls.verification(job_id, step)):
            word = calls.verified(line)
            yield word
            done = word.done
        if not done:
            raise unfinished("the server's answer was cut off")

    async def pin_checkpoint(self, job_id: str, step: int) -> CheckpointView:
        """Let nobody remove it; again is the same."""
        return await self._transport.call(calls.pin(job_id, step))

    async def unpin_checkpoint(self, job_id: str, step: int) -> CheckpointView:
        return await self._transport.call(calls.unpin(job_id, step))

    async def remove_checkpoint(self, job_id: str, step: int) -> None:
        """Raises Conflict for one that is pinned, needed, or all that a job has."""
        await self._transport.call(calls.remove_checkpoint(job_id, step))

    async def export_checkpoint(
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
        return await self._transport.download(path, params, target, on_bytes)

    async def nodes(self) -> Sequence[NodeView]:
        """Every node that was ever seen, those that are there first."""
        return await self._transport.call(calls.nodes())

    async def node(self, name: str) -> NodeView:
        """By its name, or the beginning of it."""
        return await self._transport.call(calls.node(name))

    async def cordon(self, name: str, reason: str, *, until: float | None = None) -> NodeView:
        """Let no new rank be seated there, until a time (Unix seconds) or until it is lifted."""
        return await self._transport.call(calls.cordon(name, reason, until))

    async def uncordon(self, name: str) -> NodeView:
        """Take it back, whoever had set it aside; again is the same."""
        return await self._transport.call(calls.uncordon(name))

    async def events(self, job_id: str, after: int = 0, limit: int = 200) -> EventPage:
        """One page of them."""
        return await self._transport.call(calls.events(job_id, after, limit))

    def all_events(self, job_id: str, after: int = 0) -> AsyncIterator[EventView]:
        """Those that there are; pages are fetched as they are needed."""
        return self._transport.pages(calls.all_events(job_id, after))

    def follow(self, job_id: str, after: int = 0) -> AsyncIterator[EventView]:
        """Events as they come, until the job is over; resumes where a connection broke."""
        return self._transport.follow(calls.event_feed(job_id, after))

    async def logs(
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
        return await self._transport.call(calls.logs(job_id, wanted, after, limit, tail))

    def all_logs(
        self, job_id: str, wanted: LogFilter | None = None, *, tail: int | None = None
    ) -> AsyncIterator[LogLineView]:
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
    ) -> AsyncIterator[LogLineView]:
        """Lines as they come, until the job is over; resumes where a connection broke."""
        wanted = LogFilter(rank, attempt, since, grep, level)
        return self._transport.follow(calls.log_feed(job_id, wanted, after, tail))

    def metrics(
        self, job_id: str, names: Collection[str] | None = None, after_step: int = 0
    ) -> AsyncIterator[MetricPoint]:
        """One point per committed step; pages are fetched as they are needed."""
        return self._transport.pages(calls.metrics(job_id, names, after_step))

    async def thinned_metrics(
        self, job_id: str, names: Collection[str] | None = None, *, most: int
    ) -> Sequence[MetricPoint]:
        """The whole series in at most so many points, the last one always among them."""
        return (await self._transport.call(calls.thinned_metrics(job_id, names, most))).points

    async def digests(self, job_id: str) -> dict[int, str]:
        """Digest of the whole state after each step."""
        return {step: digest async for step, digest in self._transport.pages(calls.digests(job_id))}

    async def ready(self) -> Readiness:
        """Raises ServerError if a part of the control plane is not well."""
        return await self._transport.call(calls.ready())
