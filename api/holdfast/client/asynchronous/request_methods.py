"""The requests of the REST API as methods: ids and values in, values out.

Every method retries for `retry_s` while the server is unreachable. A repetition is safe: a
submission has an idempotency key. Errors are those of `holdfast.errors`.
"""

from __future__ import annotations

import math
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from holdfast.client import address as addresses
from holdfast.client import calls, model_folder
from holdfast.client import job_names as names
from holdfast.client.async_waiting import off_loop, sleep
from holdfast.client.asynchronous.transport import AsyncTransport
from holdfast.client.calls import (
    JOBS,
    PAGE,
    Call,
    Document,
    LogQuery,
    checkpoint_path,
    job_path,
    node_path,
    operation_path,
    plain,
)
from holdfast.errors import WaitTimeout
from holdfast.formats import code_archive, requirements_file
from holdfast.schemas import Readiness, SessionCode, Version
from holdfast_service.job_model.times import rfc3339
from holdfast_service.views.attempts import AttemptView
from holdfast_service.views.checkpoints import CheckpointView
from holdfast_service.views.cluster_check import ClusterCheckView
from holdfast_service.views.comparison import ComparisonView, joined
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.history import EventView, LogLineView, MetricPoint
from holdfast_service.views.incidents import FaultView, IncidentView
from holdfast_service.views.jobs import CancelledJobView, CodeView, JobView, RemovedJobView
from holdfast_service.views.lists import ClusterView, JobRow, SpecDifferenceView
from holdfast_service.views.meshes import ValidSpecView
from holdfast_service.views.nodes import NodeView
from holdfast_service.views.operations import OperationPage, OperationView
from holdfast_service.views.pages import (
    CancelledJobPage,
    CheckpointPage,
    EventPage,
    LogPage,
    NodePage,
    SpecDifferencePage,
)
from holdfast_service.views.ranks import RanksView
from holdfast_service.views.timeline import TimelineView, VerdictView
from holdfast_service.views.token_sets import (
    DataPreparationView,
    DataSamplesView,
    SampleView,
)

T = TypeVar("T")

CLUSTER_CHECK_S = 300.0
"""The server has a shorter deadline, `cluster_check_s`."""


class AsyncRequestMethods:
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
        self._transport = AsyncTransport(server, timeout_s, retry_s)
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
        """Submit a job; the folder in its `code` is sent first. Raises InvalidSpec with every
        fault; Conflict if the key was used for another document; CodeUnusable;
        RequirementsUnusable."""
        spec = await self._with_files(spec)
        headers = _key(idempotency_key)
        return await self._send("POST", JOBS, JobView, body=plain(spec), headers=headers)

    async def validate(self, spec: Document) -> dict[str, Any]:
        """The resolved spec, with its defaults; creates no job. Raises InvalidSpec."""
        return (await self.validated(spec)).spec

    async def validated(self, spec: Document) -> ValidSpecView:
        """The resolved spec, and the meshes of an elastic job in order, with the reason for each
        place and refusal; creates no job. Raises InvalidSpec."""
        body = plain(await self._with_files(spec))
        return await self._send("POST", f"{JOBS}/validate", ValidSpecView, body=body)

    async def prepare_data(self, spec: Document) -> DataPreparationView:
        """Begin to turn the sources of a spec into tokens, or go on; how far they are. To be asked
        again until `done`. Raises InvalidSpec."""
        body = plain(await self._with_files(spec))
        return await self._send("POST", "/api/v1/data/prepare", DataPreparationView, body=body)

    async def samples(self, spec: Document, count: int = 3) -> tuple[SampleView, ...]:
        """The first samples of a spec with prepared sources, as the model will see them. Raises
        InvalidSpec, Conflict."""
        path, params = "/api/v1/data/samples", {"count": count}
        body = plain(await self._with_files(spec))
        found = await self._send("POST", path, DataSamplesView, params=params, body=body)
        return found.samples

    async def send_code(self, folder: Path) -> CodeView:
        """Send a folder of code. Can be repeated. Raises CodeUnusable."""
        package = await off_loop(code_archive.pack, folder)
        headers = {"Content-Type": "application/zip"}
        path = "/api/v1/code"
        return await self._send("POST", path, CodeView, headers=headers, content=package)

    async def _with_files(self, spec: Document) -> Document:
        """The spec with what it names on this machine: requirements, and code, which is sent."""
        file = requirements_file.file_of_spec(spec)
        if file is not None:
            assert isinstance(spec, Mapping)
            spec = requirements_file.with_requirements(
                spec, await off_loop(requirements_file.read, file)
            )
        folder = code_archive.folder_of_spec(spec)
        if folder is None:
            return spec
        package = await self.send_code(folder)
        return code_archive.with_package(spec, package.code)

    async def find(self, word: str) -> str:
        """The id of a job, given its name, its id, or the start or end of its id.

        Raises AmbiguousName, JobNotFound; a complete id is not looked up.
        """
        if names.is_id(word):
            return word
        return names.resolve(word, [row async for row in self.list(word)]).id

    def list(
        self,
        q: str | None = None,
        *,
        name: str | None = None,
        owner: str | None = None,
        state: Collection[str] | None = None,
        sort: str | None = None,
    ) -> AsyncIterator[JobRow]:
        """Jobs in short; pages are fetched as they are needed. `q`: part of a name or owner, or the
        start or end of an id; `name` and `owner` match exactly. `sort`: created (newest first, the
        default), name, state or goodput."""
        found = calls.jobs(q, name=name, owner=owner, state=state, sort=sort)
        return self._transport.pages(found)

    async def get(self, job_id: str) -> JobView:
        return await self._get(job_path(job_id), JobView)

    async def cancel(
        self, job_id: str, *, now: bool = False, if_generation: int | None = None
    ) -> JobView:
        """Cancel a job; its last state is saved first, unless `now`. `if_generation`, also of other
        commands: JobChanged is raised if users have changed the job since `JobView.generation`.

        Raises Conflict if the job has ended in another way.
        """
        params, headers = {"now": True} if now else None, _if_match(if_generation)
        path = job_path(job_id, "/cancel")
        return await self._send("POST", path, JobView, params=params, headers=headers)

    async def cancel_matching(
        self,
        q: str | None = None,
        *,
        name: str | None = None,
        owner: str | None = None,
        state: Collection[str] | None = None,
        now: bool = False,
    ) -> Sequence[CancelledJobView]:
        """Cancel all jobs that match and have not ended. Raises InvalidParameters without a
        filter."""
        params: dict[str, Any] = {"q": q, "name": name, "owner": owner, "now": now}
        params["state"] = list(state or ())
        cancelled: list[CancelledJobView] = []
        while True:
            found = await self._send("POST", f"{JOBS}/cancel", CancelledJobPage, params=params)
            cancelled += found.items
            if found.next_cursor is None:
                return cancelled
            params["cursor"] = found.next_cursor

    async def pause(self, job_id: str, *, if_generation: int | None = None) -> JobView:
        """Let a job save its state and leave the cluster. Raises Conflict if it has ended."""
        headers = _if_match(if_generation)
        return await self._send("POST", job_path(job_id, "/pause"), JobView, headers=headers)

    async def resume(self, job_id: str, *, if_generation: int | None = None) -> JobView:
        """Resume a paused job from its newest checkpoint. Raises Conflict if it has ended."""
        headers = _if_match(if_generation)
        return await self._send("POST", job_path(job_id, "/resume"), JobView, headers=headers)

    async def restart(self, job_id: str, *, if_generation: int | None = None) -> JobView:
        """Let a job save its state, leave the cluster and continue in new processes, which run the
        server's build of Holdfast. Raises Conflict if it has ended."""
        headers = _if_match(if_generation)
        return await self._send("POST", job_path(job_id, "/restart"), JobView, headers=headers)

    async def resize(
        self, job_id: str, nodes: int | None, *, if_generation: int | None = None
    ) -> JobView:
        """Train an elastic job on at most so many nodes; None: on as many as its spec allows.

        Raises InvalidParameters if its range of nodes does not allow it, Conflict if it has ended.
        """
        params = None if nodes is None else {"nodes": nodes}
        path, headers = job_path(job_id, "/resize"), _if_match(if_generation)
        return await self._send("POST", path, JobView, params=params, headers=headers)

    async def set_labels(
        self, job_id: str, labels: Mapping[str, str | None], *, if_generation: int | None = None
    ) -> JobView:
        """Change labels of a job; None removes one, the others stay. Raises InvalidParameters."""
        headers, body = _if_match(if_generation), {"labels": dict(labels)}
        return await self._send("PATCH", job_path(job_id), JobView, body=body, headers=headers)

    async def set_priority(
        self, job_id: str, priority: int, *, if_generation: int | None = None
    ) -> JobView:
        """Change the place of a job in the queue. Raises InvalidParameters."""
        headers, body = _if_match(if_generation), {"priority": priority}
        return await self._send("PATCH", job_path(job_id), JobView, body=body, headers=headers)

    async def remove(
        self, job_id: str, *, with_checkpoints: bool = False, if_generation: int | None = None
    ) -> RemovedJobView:
        """Remove an ended job with its history; its checkpoints stay unless `with_checkpoints`.

        Raises Conflict if it has not ended, or if a checkpoint to remove is pinned or needed.
        """
        params = {"checkpoints": "remove" if with_checkpoints else "keep"}
        headers = _if_match(if_generation)
        path = job_path(job_id)
        return await self._send("DELETE", path, RemovedJobView, params=params, headers=headers)

    async def replay(self, job_id: str, *, idempotency_key: str | None = None) -> JobView:
        """Submit a replay of the steps that a job has committed so far: the same training,
        undisturbed, on the same meshes. Raises Conflict if the job has no digests to compare."""
        headers = _key(idempotency_key)
        return await self._send("POST", job_path(job_id, "/replay"), JobView, headers=headers)

    async def comparison(self, replay_id: str) -> ComparisonView:
        """The digests of a replay and of the job that it replays, as far as it has come.

        Raises Conflict if the job is no replay.
        """
        path = job_path(replay_id, "/comparison")
        found = await self._get(path, ComparisonView)
        while found.next_cursor is not None:
            following = await self._get(path, ComparisonView, cursor=found.next_cursor)
            found = joined(found, following)
        return found

    async def wait(
        self, job_id: str, timeout_s: float | None = None, poll_s: float = 0.5
    ) -> JobView:
        """Wait until the job has ended, with any result. Raises WaitTimeout."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            job = await self.get(job_id)
            if job.state.terminal:
                return job
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise WaitTimeout(f"job {job_id} is {job.state.value} after {timeout_s:g} s")
            await sleep(min(poll_s, left_s))

    async def attempts(self, job_id: str) -> Sequence[AttemptView]:
        """The attempts of a job, oldest first."""
        return [item async for item in self._transport.pages(calls.attempts(job_id))]

    async def incidents(self, job_id: str) -> Sequence[IncidentView]:
        """The incidents of a job, oldest first."""
        return [item async for item in self._transport.pages(calls.incidents(job_id))]

    async def inject(
        self, job_id: str, kind: str, *, idempotency_key: str | None = None, **how: Any
    ) -> FaultView:
        """Inject a fault into a job; `how`: rank, at_step, phase and the settings of the kind.

        Raises InjectionDisabled if the server does not allow it.
        """
        body, headers = {"kind": str(kind), **how}, _key(idempotency_key)
        path = job_path(job_id, "/faults")
        return await self._send("POST", path, FaultView, body=body, headers=headers)

    async def faults(self, job_id: str) -> Sequence[FaultView]:
        """The injected faults, oldest first."""
        return [item async for item in self._transport.pages(calls.faults(job_id))]

    async def goodput(self, job_id: str) -> GoodputView:
        """The account of the job's time, so far or in total."""
        return await self._get(job_path(job_id, "/goodput"), GoodputView)

    async def verdict(self, job_id: str) -> VerdictView:
        """The state in plain sentences: the present activity, the last event, the next step."""
        return await self._get(job_path(job_id, "/verdict"), VerdictView)

    async def timeline(self, job_id: str) -> TimelineView:
        """The use of every moment of the job's time."""
        return await self._get(job_path(job_id, "/timeline"), TimelineView)

    async def ranks(self, job_id: str) -> RanksView:
        """The ranks of the newest attempt, as last seen."""
        return await self._get(job_path(job_id, "/ranks"), RanksView)

    async def difference(self, job_id: str, against: str) -> Sequence[SpecDifferenceView]:
        """The differences between the resolved specs of two jobs."""
        path = job_path(job_id, "/spec/diff")
        return (await self._get(path, SpecDifferencePage, against=against)).items

    async def cluster(self) -> ClusterView:
        """Nodes, queue and capacity."""
        return await self._get("/api/v1/cluster", ClusterView)

    async def check_cluster(self) -> ClusterCheckView:
        """Inspect every node: what is wrong where, and what to do; takes some seconds. Raises
        ServerError if the cluster does not answer."""
        path = "/api/v1/cluster/check"
        return await self._send("POST", path, ClusterCheckView, timeout_s=CLUSTER_CHECK_S)

    async def checkpoints(self, job_id: str) -> CheckpointPage:
        """The checkpoints that the job can continue from, by tier."""
        return await self._get(job_path(job_id, "/checkpoints"), CheckpointPage)

    def verify_checkpoint(self, job_id: str, step: int) -> AsyncIterator[OperationView]:
        """Verify every byte of a checkpoint; yields the operation as in :meth:`follow_operation`.
        The last one's `bad` says what is wrong. The first step of the iteration starts it."""
        return self._started(calls.verification(job_id, step))

    async def pin_checkpoint(self, job_id: str, step: int) -> CheckpointView:
        """Protect a checkpoint from removal. Can be repeated."""
        return await self._send("PUT", checkpoint_path(job_id, step, "/pin"), CheckpointView)

    async def unpin_checkpoint(self, job_id: str, step: int) -> CheckpointView:
        return await self._send("DELETE", checkpoint_path(job_id, step, "/pin"), CheckpointView)

    async def remove_checkpoint(self, job_id: str, step: int) -> None:
        """Raises Conflict if the checkpoint is pinned, needed, or the only one of a job."""
        await self._send("DELETE", checkpoint_path(job_id, step), type(None))

    def prepare_export(
        self, job_id: str, step: int, *, hugging_face: bool = False, average: bool = False
    ) -> AsyncIterator[OperationView]:
        """Verify a checkpoint and write its model to a file on the server; yields the operation as
        in :meth:`follow_operation`. :meth:`download` fetches the file."""
        return self._started(calls.export(job_id, step, hugging_face=hugging_face, average=average))

    async def export_checkpoint(
        self,
        job_id: str,
        step: int,
        target: Path,
        *,
        hugging_face: bool = False,
        average: bool = False,
        on_bytes: Callable[[int, int], None] = lambda _written, _whole: None,
    ) -> int:
        """Write the model's parameters to `target`, as safetensors; returns the size in bytes.
        `hugging_face`: make a folder that `transformers` loads, with configuration and tokenizer; a
        warning says what it lacks. `average`: the moving averages of `train.ema`.

        The server verifies every byte first, which can take a while; see :meth:`prepare_export`,
        :meth:`download` and :meth:`download_folder`.
        """
        if hugging_face:
            target = model_folder.folder_at(target)
        start = calls.export(job_id, step, hugging_face=hugging_face, average=average)
        operation = await self._transport.call(start)
        async for progress in self.follow_operation(operation.id):
            operation = progress
        if operation.content is not None and operation.content.note is not None:
            warnings.warn(f"{target}: {operation.content.note}", stacklevel=2)
        download = self.download_folder if hugging_face else self.download
        return await download(operation.id, target, on_bytes)

    async def download(
        self,
        operation_id: str,
        target: Path,
        on_bytes: Callable[[int, int], None] = lambda _written, _whole: None,
    ) -> int:
        """Write the file of an export to `target`, which appears whole or not at all; returns its
        size in bytes. `on_bytes` receives the bytes written and the total. A broken connection is
        resumed where it broke. Raises NotFound if the file is kept no longer."""
        path = operation_path(operation_id, "/content")
        return await self._transport.download(path, target, on_bytes)

    async def download_folder(
        self,
        operation_id: str,
        target: Path,
        on_bytes: Callable[[int, int], None] = lambda _written, _whole: None,
    ) -> int:
        """Write the folder of an export for Hugging Face to `target`, a new or empty folder, as
        :meth:`download` writes a file. The disk needs room for twice its size meanwhile."""
        folder = model_folder.folder_at(target)
        packed = model_folder.packed_file(folder)
        try:
            nbytes = await self.download(operation_id, packed, on_bytes)
            await off_loop(model_folder.unpack, packed, folder)
        finally:
            packed.unlink(missing_ok=True)
        return nbytes

    async def operations(
        self, job_id: str | None = None, *, active: bool | None = None
    ) -> Sequence[OperationView]:
        """The newest hundred operations; `active`: only those that have not ended, or have."""
        found = await self._get(calls.OPERATIONS, OperationPage, job=job_id, active=active)
        return found.items

    async def operation(self, operation_id: str) -> OperationView:
        """The operation (long work) with this id."""
        return await self._get(operation_path(operation_id), OperationView)

    async def cancel_operation(self, operation_id: str) -> OperationView:
        """Cancel an operation. Can be repeated. Raises Conflict if it has ended in another way."""
        return await self._send("POST", operation_path(operation_id, "/cancel"), OperationView)

    async def follow_operation(self, operation_id: str) -> AsyncIterator[OperationView]:
        """The operation again and again, until it has succeeded. It goes on without this caller,
        and if its server dies. Raises its error if it failed, OperationCancelled."""
        pause_s = calls.OPERATION_PAUSES_S[0]
        while True:
            operation = await self.operation(operation_id)
            calls.raise_for_state(operation)
            yield operation
            if operation.state.ended:
                return
            await sleep(pause_s)
            pause_s = min(2 * pause_s, calls.OPERATION_PAUSES_S[1])

    async def _started(self, start: Call[OperationView]) -> AsyncIterator[OperationView]:
        operation = await self._transport.call(start)
        yield operation
        async for later in self.follow_operation(operation.id):
            yield later

    async def nodes(self) -> Sequence[NodeView]:
        """All nodes that were ever seen, present nodes first."""
        return (await self._get(calls.NODES, NodePage)).items

    async def node(self, name: str) -> NodeView:
        """A node by its name, or the start of the name."""
        return await self._get(node_path(name), NodeView)

    async def cordon(self, name: str, reason: str, *, until: float | None = None) -> NodeView:
        """Place no new rank on a node, until a time (Unix seconds) or until `uncordon`."""
        body = {"reason": reason, "until": None if until is None else rfc3339(until)}
        return await self._send("POST", node_path(name, "/cordon"), NodeView, body=body)

    async def uncordon(self, name: str) -> NodeView:
        """End the cordon or quarantine of a node. Can be repeated."""
        return await self._send("POST", node_path(name, "/uncordon"), NodeView)

    async def events(self, job_id: str, after: int = 0, limit: int = 200) -> EventPage:
        """One page of events."""
        return await self._transport.call(calls.events(job_id, after, limit))

    def all_events(self, job_id: str, after: int = 0) -> AsyncIterator[EventView]:
        """The stored events; pages are fetched as they are needed."""
        return self._transport.pages(calls.all_events(job_id, after))

    def follow(self, job_id: str, after: int = 0) -> AsyncIterator[EventView]:
        """Events as they occur, until the job has ended; resumes after a broken connection."""
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
        """One page of the ranks' output."""
        wanted = LogQuery(rank=rank, attempt=attempt)
        return await self._transport.call(calls.logs(job_id, wanted, after, limit, tail))

    def all_logs(
        self, job_id: str, wanted: LogQuery | None = None, *, tail: int | None = None
    ) -> AsyncIterator[LogLineView]:
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
    ) -> AsyncIterator[LogLineView]:
        """Lines as they are written, until the job has ended; resumes after a broken connection."""
        wanted = LogQuery(rank, attempt, since, grep, level)
        return self._transport.follow(calls.log_feed(job_id, wanted, after, tail))

    def metrics(
        self, job_id: str, names: Collection[str] | None = None, after_step: int | None = None
    ) -> AsyncIterator[MetricPoint]:
        """One point per committed step; pages are fetched as they are needed."""
        return self._transport.pages(calls.metrics(job_id, names, after_step))

    async def thinned_metrics(
        self, job_id: str, names: Collection[str] | None = None, *, most: int
    ) -> Sequence[MetricPoint]:
        """The whole series in at most `most` points, always including the last one."""
        page = await self._transport.call(calls.thinned_metrics(job_id, names, most))
        return page.items

    async def digests(self, job_id: str) -> dict[int, str]:
        """Digest of the whole state after each step."""
        pages = self._transport.pages(calls.digests(job_id))
        return {item.step: item.digest async for item in pages}

    async def version(self) -> Version:
        """The version and the build of the server."""
        return await self._get("/version", Version)

    async def session_code(self) -> SessionCode:
        """A code that lets one browser in: for `/#code=` of the dashboard's address."""
        return await self._send("POST", "/api/v1/session/codes", SessionCode)

    async def ready(self) -> Readiness:
        """Raises ServerError if a part of the control plane is not ready."""
        return await self._get("/readyz", Readiness)

    async def _get(self, path: str, answer: type[T], **params: Any) -> T:
        return await self._transport.call(calls.get(path, answer, **params))

    async def _send(self, method: str, path: str, answer: type[T], **parts: Any) -> T:
        """Send a request. `parts`: the other fields of the `Call`."""
        return await self._transport.call(calls.call(method, path, answer, **parts))


def _key(given: str | None) -> dict[str, str]:
    return {"Idempotency-Key": given or str(uuid.uuid4())}


def _if_match(generation: int | None) -> dict[str, str] | None:
    return None if generation is None else {"If-Match": f'"{generation}"'}
