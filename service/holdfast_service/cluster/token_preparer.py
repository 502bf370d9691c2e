"""Makes token sets on the cluster: one actor of an installation, which plans each source and has
Ray run its parts.

Jobs with the same source share its preparation. All state is in the storage: if the actor, a task
or a node dies, the next one continues with the parts that are there. The actor opens no file of a
user. It abandons work for which no server asks any more, and ends when it has none.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray
import structlog

from holdfast_service.cluster.node_tasks import NoNode
from holdfast_service.cluster.preparation_tasks import (
    TaskEnd,
    TaskSlots,
    begin_part,
    begin_plan,
    end_of,
)
from holdfast_service.job_model.data_preparation import (
    PreparePhase,
    SourceProgress,
    SourceRequest,
)
from holdfast_service.remote_tier.location import storage_options
from holdfast_service.wording import duration, plural
from holdfast_workers import log_setup
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage, TransientStorageError, joined
from holdfast_workers.data.token_set import TokenSet
from holdfast_workers.errors import WorkersError
from holdfast_workers.protocol import codec
from holdfast_workers.spec import PreparedSpec
from holdfast_workers.token_sets.part_results import PartResult
from holdfast_workers.token_sets.plan import Part, PreparePlan
from holdfast_workers.token_sets.prepare import check_share, finish, finished_parts, ready_set
from holdfast_workers.token_sets.tokenizer_file import TokenizerFile

AT_ONCE = 8
"""Sources that are worked on; others wait for them. One whose storage fails lets others go on."""
ABANDONED_S = 120.0
"""Time without a question after which a source is given up, and the actor ends without work."""
FRESH_S = 10.0
"""An outcome for which nobody has asked for longer is found anew: files may have changed."""
LOOK_S = 1.0
RETRY_S = 5.0
"""Pause before another try after the storage failed for a while."""
MOST_DEATHS = 5
"""Processes that one part, or the plan, may take with it."""
SILENT_S = 60.0
"""Time without news after which the progress says so."""
QUEUED = "it waits for other preparations"
BUSY = "all nodes make parts of other sources"
MOST_NAMED = 20

_log = structlog.get_logger()

Credentials = tuple[dict[str, str] | None, ...]
"""Of the storage of token sets, of the source, and of each of `SourceRequest.apart_from`."""


class TokenPreparer:
    """Answers while threads of its own work."""

    def __init__(self) -> None:
        log_setup.configure(timestamps=True)
        self._slots = TaskSlots()
        self._threads = ThreadPoolExecutor(AT_ONCE, "source")
        self._lock = threading.Lock()
        self._works: dict[str, _SourceWork] = {}
        self._asked_at = time.monotonic()
        threading.Thread(target=self._give_up_unasked, name="end", daemon=True).start()

    def ask(self, document: bytes, credentials: Credentials) -> bytes:
        """Begin to prepare the source of a `SourceRequest`, or go on: its `SourceProgress`."""
        request = codec.decode(document, SourceRequest)
        with self._lock:
            self._asked_at = time.monotonic()
            work = self._works.get(request.name)
            if work is None or work.is_stale:
                work = self._works[request.name] = _SourceWork(request, credentials, self._slots)
                self._threads.submit(self._carry_on, work)
        return codec.encode(work.progress(request.sequence_length))

    def _carry_on(self, work: _SourceWork) -> None:
        if not work.run():
            self._threads.submit(self._carry_on, work)

    def _give_up_unasked(self) -> None:
        while True:
            time.sleep(LOOK_S)
            now = time.monotonic()
            with self._lock:
                for name, work in list(self._works.items()):
                    if now - work.asked_at > ABANDONED_S:
                        work.abandoned = True
                        del self._works[name]
                ends = not self._works and now - self._asked_at > ABANDONED_S
            if ends:
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class _NobodyAsks(Exception):
    """Nobody asks for the source any more."""


class _Refused(WorkersError):
    """The source cannot be prepared as it is."""


class _SourceWork:
    """The preparation of one source, in one thread; others read its progress."""

    def __init__(self, request: SourceRequest, credentials: Credentials, slots: TaskSlots) -> None:
        self._request = request
        of_store, *of_sources = credentials
        self._store = storage_options(request.remote, of_store)
        self._source, *self._apart_from = (
            storage_options(source, its_own, refuse_local=request.refuse_local)
            for source, its_own in zip(
                (request.source, *request.apart_from), of_sources, strict=True
            )
        )
        self._slots = slots
        self._progress = SourceProgress(request.source.path, waits=QUEUED)
        self._news_at = self.asked_at = time.monotonic()
        self._began, self._had_bytes = time.monotonic(), 0
        self._deaths: Counter[int | None] = Counter()
        """Of processes that made each part, or the plan (None)."""
        self._made: TokenSet | None = None
        self.abandoned = False

    @property
    def is_stale(self) -> bool:
        return self._progress.is_over and time.monotonic() - self.asked_at > FRESH_S

    def progress(self, sequence_length: int | None) -> SourceProgress:
        """`sequence_length`: for which the samples of the token set are counted."""
        now = self.asked_at = time.monotonic()
        found, silent_s = self._progress, now - self._news_at
        if found.prepared and self._made and sequence_length:
            samples = self._made.samples(sequence_length)
            counted = {"sequence_length": sequence_length, "samples": samples}
            return replace(found, prepared=found.prepared.model_copy(update=counted))
        if found.is_over or found.waits or silent_s < SILENT_S:
            return found
        doing = "listed" if found.phase is PreparePhase.LISTING else "read"
        why = f"its files are being {doing}, and nothing has ended for {duration(silent_s)}"
        return replace(found, waits=why)

    def run(self) -> bool:
        """Prepare it. False: it must be run again, as a storage failed for a while, or no node is
        there."""
        try:
            self._prepare()
        except _NobodyAsks:
            pass
        except (TransientStorageError, NoNode) as error:
            self._note(waits=str(error))
            time.sleep(RETRY_S)
            return False
        except WorkersError as error:
            self._refuse(str(error))
        except BaseException as error:
            _log.exception("a preparation failed")
            self._refuse(f"an unexpected error ({type(error).__name__}): see the log of Ray")
        return True

    def _refuse(self, why: str) -> None:
        self._note(phase=PreparePhase.REFUSED, error=why, waits="")

    def _prepare(self) -> None:
        shared, (plan, tokenizer) = self._plan()
        uri = joined(self._request.root, plan.key)
        storage = open_storage(uri, self._store)
        self._note(files=plan.files, total_bytes=plan.source_bytes)
        made = ready_set(storage)
        if made is None:
            made = finish(plan, self._make_parts(plan, shared, storage, uri), storage)
        check_share(made, self._request.data.bad_records)
        self._finish(made, uri, tokenizer)

    def _plan(self) -> tuple[Any, tuple[PreparePlan, TokenizerFile]]:
        """A reference to the end of the task that planned it, and its result. The reference is of
        this process: the node of the task may be lost."""
        while True:
            node = self._take_node()
            self._note_turn(is_busy=node is None)
            if node is None:
                time.sleep(LOOK_S)
                continue
            task, end = None, TaskEnd()
            try:
                task = begin_plan(node, self._request, self._source, self._apart_from)
                self._wait([task])
                end = end_of(task)
            finally:
                if task is not None:
                    ray.cancel(task, force=True)  # a file system that hangs holds no process
                self._slots.give_back(node, end.unfit)
            if (result := self._result(end, None)) is not None:
                return ray.put(end), result
            time.sleep(RETRY_S)

    def _take_node(self) -> str | None:
        """A node for a task. Raises NoNode, _NobodyAsks."""
        if self.abandoned:
            raise _NobodyAsks
        return self._slots.take()

    def _wait(self, tasks: list[Any]) -> list[Any]:
        """The first of the tasks that end. Raises _NobodyAsks."""
        while True:
            ended, _ = ray.wait(tasks, timeout=LOOK_S)
            if ended:
                return list(ended)
            if self.abandoned:
                raise _NobodyAsks

    def _result(self, end: TaskEnd, part: Part | None) -> Any:
        """The result of a task that made a part, or the plan; None: it is tried again. Raises
        _Refused."""
        if end.refused:
            raise _Refused(end.refused)
        if end.died:
            which = None if part is None else part.index
            self._deaths[which] += 1
            what = "the list of its files" if part is None else f"part {which}, {_files_of(part)},"
            times = plural(self._deaths[which], "time")
            why = f"the process that made {what} ended {times} ({end.died})"
            if self._deaths[which] >= MOST_DEATHS:
                raise _Refused(
                    f"{why}: give the nodes more memory, or repair, divide or leave out the file "
                    "at fault"
                )
            self._note(waits=why)
        elif end.result is None:
            self._note(waits=end.later or end.unfit)
        return end.result

    def _make_parts(
        self, plan: PreparePlan, shared: Any, storage: Storage, uri: str
    ) -> dict[int, PartResult]:
        made = finished_parts(plan, storage)
        self._began, self._had_bytes = time.monotonic(), _bytes_of(made)
        waiting = deque(part for part in plan.parts if part.index not in made)
        flying: dict[Any, tuple[str, Part]] = {}
        pause_until = 0.0
        self._count(made)
        try:
            while waiting or flying:
                while waiting and time.monotonic() >= pause_until:
                    node = self._take_node()
                    if node is None:
                        break
                    part = waiting.popleft()
                    try:
                        task = begin_part(node, shared, part, uri, self._store, self._source)
                    except BaseException:
                        self._slots.give_back(node)
                        raise
                    flying[task] = node, part
                self._note_turn(is_busy=not flying and time.monotonic() >= pause_until)
                if not flying:
                    time.sleep(LOOK_S)
                for task in self._wait(list(flying)) if flying else ():
                    end = end_of(task)
                    node, part = flying.pop(task)
                    self._slots.give_back(node, end.unfit)
                    result = self._result(end, part)
                    if isinstance(result, PartResult):
                        made[part.index] = result
                        self._count(made)
                    else:
                        waiting.append(part)
                        pause_until = time.monotonic() + RETRY_S
        finally:
            for task, (node, _) in flying.items():
                ray.cancel(task, force=True)
                self._slots.give_back(node)
        return made

    # --- what is said of it -------------------------------------------------------------------

    def _count(self, made: Mapping[int, PartResult]) -> None:
        done = _bytes_of(made)
        took_s = max(time.monotonic() - self._began, 1e-3)
        shards = [shard for part in made.values() for shard in part.shards]
        held_out = [shard for part in made.values() for shard in part.held_out]
        self._note(
            phase=PreparePhase.TOKENIZING,
            waits="",
            done_bytes=done,
            bytes_per_s=(done - self._had_bytes) / took_s,
            tokens=sum(shard.tokens for shard in shards),
            documents=sum(shard.documents for shard in shards),
            held_out_tokens=sum(shard.tokens for shard in held_out),
            bad_count=sum(part.bad_count for part in made.values()),
        )

    def _finish(self, made: TokenSet, uri: str, tokenizer: TokenizerFile) -> None:
        self._made = made
        held_out = sum(shard.tokens for shard in made.held_out)
        self._note(
            phase=PreparePhase.READY,
            waits="",
            done_bytes=made.source_bytes,
            total_bytes=made.source_bytes,
            tokens=made.tokens,
            documents=made.documents,
            held_out_tokens=held_out,
            bad_count=made.bad_count,
            bad=tuple(f"{bad.file}, row {bad.row}: {bad.why}" for bad in made.bad[:MOST_NAMED]),
            prepared=PreparedSpec(
                uri=uri,
                origin=self._request.origin,
                digest=made.digest,
                vocabulary=made.tokenizer.vocabulary,
                tokens=made.tokens,
                held_out=held_out,
                tokenizer=made.tokenizer.digest,
                document_end=made.tokenizer.document_end,
            ),
            special_tokens=tokenizer.special_tokens,
        )

    def _note_turn(self, *, is_busy: bool) -> None:
        """Whether it waits for nodes that others use. Another reason to wait is kept until it is
        over."""
        if is_busy:
            self._note(waits=BUSY)
        elif self._progress.waits in (QUEUED, BUSY):
            self._note(waits="")

    def _note(self, **changes: Any) -> None:
        self._news_at = time.monotonic()
        self._progress = replace(self._progress, **changes)


def _bytes_of(made: Mapping[int, PartResult]) -> int:
    return sum(part.source_bytes for part in made.values())


def _files_of(part: Part) -> str:
    """`of a.jsonl`, or `of a.txt to z.txt, 1,000 files`."""
    names = list(dict.fromkeys(piece.file.name for piece in part.pieces))
    first, *others = names
    return f"of {first} to {names[-1]}, {len(names):,} files" if others else f"of {first}"
