"""Makes token sets on the cluster: one actor of an installation, which plans each source and has
Ray run its parts. It has the weights of published models read in the same way.

Jobs with the same source share its preparation. All state is in the storage: if the actor, a task
or a node dies, the next one continues with the parts that are there. The actor opens no file of a
user. It abandons work for which no server asks any more, and ends when it has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import ray

from holdfast_service.cluster.preparation_tasks import TaskEnd, TaskSlots, begin_part, begin_plan
from holdfast_service.cluster.preparation_work import LOOK_S, PreparationWork
from holdfast_service.cluster.weights_work import WeightsWork
from holdfast_service.job_model.preparation import (
    PreparePhase,
    SourceProgress,
    SourceRequest,
    WeightsRequest,
)
from holdfast_service.remote_tier.location import storage_options
from holdfast_workers import log_setup
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage, joined
from holdfast_workers.data.token_set import TokenSet
from holdfast_workers.protocol import codec
from holdfast_workers.published.kept_tokenizer import keep_tokenizer
from holdfast_workers.spec import PreparedSpec
from holdfast_workers.token_sets.part_results import PartResult
from holdfast_workers.token_sets.plan import Part, PreparePlan
from holdfast_workers.token_sets.prepare import check_share, finish, finished_parts, ready_set
from holdfast_workers.token_sets.tokenizer_file import TokenizerFile

AT_ONCE = 8
"""Preparations that are worked on; others wait for them. One whose storage fails lets others go
on."""
ABANDONED_S = 120.0
"""Time without a question after which one is given up, and the actor ends without work."""
MOST_NAMED = 20

Credentials = tuple[dict[str, str] | None, ...]
"""Of the storage of token sets, of the source, and of each of `SourceRequest.apart_from`."""
Work = TypeVar("Work", bound=PreparationWork[Any])


class TokenPreparer:
    """Answers while threads of its own work."""

    def __init__(self) -> None:
        log_setup.configure(timestamps=True)
        self._slots = TaskSlots()
        self._threads = ThreadPoolExecutor(AT_ONCE, "preparation")
        self._lock = threading.Lock()
        self._works: dict[str, PreparationWork[Any]] = {}
        self._asked_at = time.monotonic()
        threading.Thread(target=self._give_up_unasked, name="end", daemon=True).start()

    def ask(self, document: bytes, credentials: Credentials) -> bytes:
        """Begin to prepare the source of a `SourceRequest`, or go on: its `SourceProgress`."""
        request = codec.decode(document, SourceRequest)
        work = self._begun(
            request.name, SourceWork, lambda: SourceWork(request, credentials, self._slots)
        )
        return codec.encode(work.progress(request.sequence_length))

    def ask_weights(self, document: bytes, credentials: dict[str, str] | None) -> bytes:
        """Begin to read the folder of a `WeightsRequest`, or go on: its `WeightsProgress`.
        `credentials`: of the storage of weights."""
        request = codec.decode(document, WeightsRequest)
        work = self._begun(
            request.name, WeightsWork, lambda: WeightsWork(request, credentials, self._slots)
        )
        return codec.encode(work.progress())

    def _begun(self, name: str, kind: type[Work], new: Callable[[], Work]) -> Work:
        """The work of this name, which is carried on."""
        with self._lock:
            self._asked_at = time.monotonic()
            work = self._works.get(name)
            if not isinstance(work, kind) or work.is_stale:
                work = self._works[name] = new()
                self._threads.submit(self._carry_on, work)
        return work

    def _carry_on(self, work: PreparationWork[Any]) -> None:
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


class SourceWork(PreparationWork[SourceProgress]):
    """The preparation of one source."""

    remedy = "give the nodes more memory, or repair, divide or leave out the file at fault"

    def __init__(self, request: SourceRequest, credentials: Credentials, slots: TaskSlots) -> None:
        super().__init__(SourceProgress(request.source.path), slots)
        self._request = request
        of_store, *of_sources = credentials
        self._store = storage_options(request.remote, of_store)
        self._source, *self._apart_from = (
            storage_options(source, its_own, refuse_local=request.refuse_local)
            for source, its_own in zip(
                (request.source, *request.apart_from), of_sources, strict=True
            )
        )
        self._began, self._had_bytes = time.monotonic(), 0
        self._made: TokenSet | None = None

    def progress(self, sequence_length: int | None) -> SourceProgress:
        """`sequence_length`: for which the samples of the token set are counted."""
        is_listed = self._progress.phase is PreparePhase.LISTING
        found = self._with_silence("listed" if is_listed else "read")
        if found.prepared and self._made and sequence_length:
            samples = self._made.samples(sequence_length)
            counted = {"sequence_length": sequence_length, "samples": samples}
            return replace(found, prepared=found.prepared.model_copy(update=counted))
        return found

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
        tokenizer_files = keep_tokenizer(storage, tokenizer.files)
        check_share(made, self._request.data.bad_records)
        self._finish(made, uri, tokenizer, tokenizer_files)

    def _plan(self) -> tuple[Any, tuple[PreparePlan, TokenizerFile]]:
        """A reference to the end of the task that planned it, and its result. The reference is of
        this process: the node of the task may be lost."""

        def begin(node: str) -> Any:
            return begin_plan(node, self._request, self._source, self._apart_from)

        planned = self._carry_out_one(begin, "made the list of its files")
        return ray.put(TaskEnd(planned)), planned

    def _make_parts(
        self, plan: PreparePlan, shared: Any, storage: Storage, uri: str
    ) -> dict[int, PartResult]:
        made = finished_parts(plan, storage)
        self._began, self._had_bytes = time.monotonic(), _bytes_of(made)
        self._count(made)

        def begin(node: str, part: Part) -> Any:
            return begin_part(node, shared, part, uri, self._store, self._source)

        def ended(part: Part, result: PartResult) -> None:
            made[part.index] = result
            self._count(made)

        missing = [part for part in plan.parts if part.index not in made]
        self._carry_out(
            missing, begin, ended, lambda part: f"made part {part.index}, {_files_of(part)},"
        )
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

    def _finish(
        self, made: TokenSet, uri: str, tokenizer: TokenizerFile, tokenizer_files: str | None
    ) -> None:
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
                tokenizer_files=tokenizer_files,
                document_end=made.tokenizer.document_end,
            ),
            special_tokens=tokenizer.special_tokens,
        )


def _bytes_of(made: Mapping[int, PartResult]) -> int:
    return sum(part.source_bytes for part in made.values())


def _files_of(part: Part) -> str:
    """`of a.jsonl`, or `of a.txt to z.txt, 1,000 files`."""
    names = list(dict.fromkeys(piece.file.name for piece in part.pieces))
    first, *others = names
    return f"of {first} to {names[-1]}, {len(names):,} files" if others else f"of {first}"
