"""Makes the token set of one source on the cluster: an actor that plans it and has Ray run the
parts, each as a task that takes one CPU and no device.

The actor is detached and named after its request, so that all jobs and servers that want the same
source share it. All that it knows is in the storage: wherever it, a task or a node dies, the next
one goes on with the parts that are there. It ends once its outcome was fetched, or if no server
asks for it any more.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Any

import ray
import structlog
from ray.exceptions import RayError, RayTaskError

from holdfast_service.cluster.runtime_env import with_code
from holdfast_service.diagnosis.unfit_software import cannot_load
from holdfast_service.job_model.data_preparation import (
    PreparePhase,
    SourceProgress,
    SourceRequest,
)
from holdfast_service.remote_tier.location import storage_options
from holdfast_workers import log_setup
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import (
    ObjectMissing,
    Storage,
    TransientStorageError,
)
from holdfast_workers.data.token_set import TokenSet
from holdfast_workers.errors import WorkersError
from holdfast_workers.node_cache.cached_file import cache_folder
from holdfast_workers.private_files import make_private_folder
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec import PreparedSpec
from holdfast_workers.token_sets.part_results import PartResult
from holdfast_workers.token_sets.plan import Part, PreparePlan, plan_parts
from holdfast_workers.token_sets.prepare import (
    check_share,
    finish,
    finished_parts,
    make_part,
    read_set,
)
from holdfast_workers.token_sets.source_files import list_source
from holdfast_workers.token_sets.tokenizer_file import TokenizerFile, read_tokenizer

ABANDONED_S = 120.0
"""Time without a question after which it ends."""
FETCHED_S = 2.0
"""Time from the first fetch of its outcome to its end."""
LOOK_S = 1.0
RETRY_S = 5.0
"""Pause before another try after the storage failed for a while."""
MOST_STARTS = 5
"""Processes that one part may take with it."""
SPARE_TASKS = 2
"""Tasks beyond the number of CPUs that are queued, so that none of these waits for work."""
MOST_NAMED = 20

_log = structlog.get_logger()
_SCRATCH = "preparation"

Credentials = tuple[dict[str, str] | None, dict[str, str] | None]
"""Of the storage of token sets, and of the source."""


class TokenPreparer:
    """Answers while a thread of its own works."""

    def __init__(self, document: bytes, credentials: Credentials) -> None:
        """`document`: its `SourceRequest`."""
        log_setup.configure(timestamps=True)
        request = codec.decode(document, SourceRequest)
        self._request = request
        self._store = storage_options(request.remote, credentials[0])
        self._source = StorageOptions(
            endpoint=request.source.endpoint,
            region=request.source.region,
            credentials=credentials[1],
            refuse_local=request.refuse_local,
        )
        self._progress = SourceProgress(request.source.path)
        self._asked_at = time.monotonic()
        self._fetched_at: float | None = None
        self._began = time.monotonic()
        self._had_bytes = 0
        self._starts: dict[int, int] = {}
        threading.Thread(target=self._run, name="preparation", daemon=True).start()
        threading.Thread(target=self._end_unasked, name="end", daemon=True).start()

    def progress(self) -> bytes:
        """The document of its `SourceProgress`."""
        self._asked_at = time.monotonic()
        progress = self._progress
        if progress.is_over and self._fetched_at is None:
            self._fetched_at = self._asked_at
        return codec.encode(progress)

    # --- the work ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                self._finish(*self._prepared())
                return
            except TransientStorageError as error:
                self._note(waits=str(error))
                time.sleep(RETRY_S)
            except WorkersError as error:
                self._note(phase=PreparePhase.REFUSED, error=str(error), waits="")
                return
            except OSError as error:
                why = f"{error.filename or 'a file'}: {error.strerror or error}"
                self._note(phase=PreparePhase.REFUSED, error=why, waits="")
                return
            except Exception as error:
                _log.exception("a preparation failed")
                why = f"an unexpected error ({type(error).__name__}): see the log of Ray's worker"
                self._note(phase=PreparePhase.REFUSED, error=why, waits="")
                return

    def _prepared(self) -> tuple[TokenSet, Storage]:
        data, source = self._request.data, self._request.source
        tokenizer = read_tokenizer(data)
        plan = plan_parts(source, list_source(source, self._source), tokenizer.facts, data)
        storage = open_storage(self._request.root, self._store).below(plan.key)
        self._note(files=plan.files, total_bytes=plan.source_bytes, waits="")
        try:
            made = read_set(storage, None)
        except ObjectMissing:
            made = finish(plan, self._make_parts(plan, tokenizer, storage), storage)
        check_share(made, data.bad_records)
        return made, storage

    def _finish(self, made: TokenSet, storage: Storage) -> None:
        self._note(
            phase=PreparePhase.READY,
            waits="",
            done_bytes=made.source_bytes,
            total_bytes=made.source_bytes,
            tokens=made.tokens,
            documents=made.documents,
            bad_count=made.bad_count,
            bad=tuple(f"{bad.file}, row {bad.row}: {bad.why}" for bad in made.bad[:MOST_NAMED]),
            prepared=PreparedSpec(
                uri=storage.uri,
                origin=self._request.origin,
                digest=made.digest,
                vocabulary=made.tokenizer.vocabulary,
                tokens=made.tokens,
            ),
        )

    def _make_parts(
        self, plan: PreparePlan, tokenizer: TokenizerFile, storage: Storage
    ) -> dict[int, PartResult]:
        made = finished_parts(plan, storage)
        self._began, self._had_bytes = time.monotonic(), _bytes_of(made)
        waiting = deque(part for part in plan.parts if part.index not in made)
        shared = ray.put((plan, tokenizer))
        flying: dict[Any, Part] = {}
        pause_until = 0.0
        self._count(made)
        try:
            while waiting or flying:
                if time.monotonic() >= pause_until:
                    while waiting and len(flying) < _most_tasks():
                        part = waiting.popleft()
                        flying[self._start(shared, part, storage.uri)] = part
                done, _ = ray.wait(list(flying), timeout=LOOK_S) if flying else ([], [])
                if not flying:
                    time.sleep(LOOK_S)
                for task in done:
                    part = flying.pop(task)
                    outcome = self._outcome(task, part)
                    if isinstance(outcome, PartResult):
                        made[part.index] = outcome
                        self._count(made)
                    else:
                        waiting.append(part)
                        pause_until = time.monotonic() + RETRY_S
                        self._note(waits=outcome)
                if not done and flying and not _free_cpus():
                    self._note(waits="it waits for a free CPU of the cluster")
        finally:
            for task in flying:
                ray.cancel(task, force=True)
        return made

    def _start(self, shared: Any, part: Part, uri: str) -> Any:
        task = ray.remote(_make_part).options(
            num_cpus=_cpus_of_task(), max_retries=0, **with_code(None)
        )
        return task.remote(shared, part, uri, self._store, self._source)

    def _outcome(self, task: Any, part: Part) -> PartResult | str:
        """The part's result, or why it is tried again. Raises WorkersError: it is refused."""
        try:
            result, refused, later = ray.get(task)
        except RayTaskError as error:
            if cannot_load(error):
                raise _NotMade(
                    f"a node cannot run its tasks ({error.cause}): install the same version of "
                    "Holdfast with its extra `data` on all nodes"
                ) from error
            raise
        except RayError as error:  # the process or its node ended
            starts = self._starts[part.index] = self._starts.get(part.index, 0) + 1
            why = f"{type(error).__name__} in {_first_file(part)}"
            if starts >= MOST_STARTS:
                raise _NotMade(
                    f"{why}: its process ended {starts} times; is a node out of memory?"
                ) from error
            return why
        if refused:
            raise _NotMade(refused)
        if result is None:
            return str(later)
        assert isinstance(result, PartResult)
        return result

    def _count(self, made: dict[int, PartResult]) -> None:
        done = _bytes_of(made)
        took_s = max(time.monotonic() - self._began, 1e-3)
        shards = [shard for part in made.values() for shard in part.shards]
        self._note(
            phase=PreparePhase.TOKENIZING,
            waits="",
            done_bytes=done,
            bytes_per_s=(done - self._had_bytes) / took_s,
            tokens=sum(shard.tokens for shard in shards),
            documents=sum(shard.documents for shard in shards),
            bad_count=sum(part.bad_count for part in made.values()),
        )

    def _note(self, **changes: Any) -> None:
        self._progress = replace(self._progress, **changes)

    def _end_unasked(self) -> None:
        while True:
            time.sleep(LOOK_S)
            now, fetched = time.monotonic(), self._fetched_at
            if now - self._asked_at > ABANDONED_S or (fetched and now - fetched > FETCHED_S):
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
                return


class _NotMade(WorkersError):
    """The source cannot be prepared as it is."""


def _make_part(
    shared: tuple[PreparePlan, TokenizerFile],
    part: Part,
    uri: str,
    store: StorageOptions,
    source: StorageOptions,
) -> tuple[PartResult | None, str, str]:
    """The part; why its source is refused; why it may be tried again."""
    plan, tokenizer = shared
    scratch = cache_folder(os.environ) / _SCRATCH
    make_private_folder(scratch)
    try:
        storage = open_storage(uri, store)
        return make_part(plan, part, tokenizer, storage, source, scratch, _no_progress), "", ""
    except TransientStorageError as error:
        return None, "", str(error)
    except WorkersError as error:
        return None, str(error), ""
    except OSError as error:
        return None, "", f"{error.filename or 'a file'}: {error.strerror or error}"


def _no_progress(nbytes: int) -> None:
    """A part is small: its end is progress enough."""


def _bytes_of(made: dict[int, PartResult]) -> int:
    return sum(part.source_bytes for part in made.values())


def _cpus_of_task() -> float:
    """One, or what the largest node has."""
    found = (node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"])
    return min(1.0, max(found, default=1.0) or 1.0)


def _most_tasks() -> int:
    return int(ray.cluster_resources().get("CPU", 1)) + SPARE_TASKS


def _free_cpus() -> bool:
    return float(ray.available_resources().get("CPU", 0.0)) >= 1


def _first_file(part: Part) -> str:
    return f"part {part.index}"
