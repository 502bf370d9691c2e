"""The tasks that read users' files for token sets, and where all tasks of preparations run.

A task takes none of its node's resources from Ray, so that no job waits for it; it has the lowest
priority there, and a node gets as many as it has CPUs, and memory for. Whatever a file does to its
process ends that process alone.
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import structlog
from ray.exceptions import RayError, RayTaskError

from holdfast_service.cluster.node_tasks import NoNode, task_on
from holdfast_service.cluster.runtime_env import with_code
from holdfast_service.diagnosis.unfit_software import cannot_load
from holdfast_service.job_model.preparation import SourceRequest
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import TransientStorageError
from holdfast_workers.errors import WorkersError
from holdfast_workers.node_cache.cached_file import cache_folder
from holdfast_workers.private_files import make_private_folder
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.token_sets.part_results import PartResult
from holdfast_workers.token_sets.plan import Part, PreparePlan, plan_parts
from holdfast_workers.token_sets.prepare import make_part
from holdfast_workers.token_sets.refusals import LibraryMissing
from holdfast_workers.token_sets.source_files import list_source, refuse_shared_files
from holdfast_workers.token_sets.tokenizer_file import TokenizerFile, read_tokenizer

LOWEST_PRIORITY = 19
TASK_BYTES = 4_000_000_000
"""Memory of a node for each of its tasks: one took up to 3.5 GB, with the longest document."""
_SCRATCH = "preparation"
_MOST_WORDS = 2_000
"""Characters of the reason of a refusal."""

_log = structlog.get_logger()


@dataclass(frozen=True)
class TaskEnd:
    """How a task has ended: with a result, or with one of the reasons."""

    result: Any = None
    refused: str = ""
    """Why the source cannot be prepared as it is."""
    later: str = ""
    """Why it may be tried again."""
    unfit: str = ""
    """Why this node can run no such task."""
    died: str = ""
    """What ended the task's process, or its node."""


class TaskSlots:
    """The nodes that run tasks, and how many each has. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()
        self._unfit: dict[str, str] = {}

    def take(self) -> str | None:
        """The node with most room; None: all have enough. Raises NoNode if there is none that can
        run tasks."""
        most = {
            str(node["NodeID"]): _most_tasks(node["Resources"])
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0.0)
        }
        with self._lock:
            fit = {node: count for node, count in most.items() if node not in self._unfit}
            if most and not fit:
                reasons = "; ".join(sorted(set(self._unfit.values())))
                self._unfit.clear()  # they may be mended meanwhile: the next try finds out
                raise NoNode(reasons)
            if not fit:
                raise NoNode("the cluster has no node with CPUs")
            node = max(fit, key=lambda each: fit[each] - self._taken[each])
            if self._taken[node] >= fit[node]:
                return None
            self._taken[node] += 1
            return node

    def give_back(self, node: str, unfit: str = "") -> None:
        """`unfit`: why the node gets no further task."""
        with self._lock:
            self._taken[node] -= 1
            if unfit:
                self._unfit[node] = unfit


def begin_plan(
    node: str,
    request: SourceRequest,
    source: StorageOptions,
    apart_from: Sequence[StorageOptions],
) -> Any:
    """The reference of the end of a task with (`PreparePlan`, `TokenizerFile`). `apart_from`: of
    the buckets of `SourceRequest.apart_from`."""
    return task_on(node, _plan, with_code(None)).remote(request, source, apart_from)


def begin_part(
    node: str, shared: Any, part: Part, uri: str, store: StorageOptions, source: StorageOptions
) -> Any:
    """The reference of the end of a task with a `PartResult`. `shared`: a reference to the end of a
    task of `begin_plan`."""
    return task_on(node, _make_part, with_code(None)).remote(shared, part, uri, store, source)


def end_of(task: Any) -> TaskEnd:
    """The end of a task that is ready."""
    try:
        end = ray.get(task)
        assert isinstance(end, TaskEnd)
        return end
    except RayTaskError as error:
        if cannot_load(error):
            why = "install the same version of Holdfast, with its extra `data`, on all nodes"
            return TaskEnd(unfit=f"a node cannot run its tasks ({error.cause}): {why}")
        if isinstance(error.cause, RayError):  # its arguments did not reach the node
            return TaskEnd(died=type(error.cause).__name__)
        return TaskEnd(refused=_unexpected(error.cause))
    except RayError as error:
        return TaskEnd(died=type(error).__name__)


def _most_tasks(resources: Mapping[str, float]) -> int:
    """Of a node with these resources of Ray."""
    by_memory = resources.get("memory", math.inf) // TASK_BYTES
    return max(1, int(min(resources["CPU"], by_memory)))


def _plan(
    request: SourceRequest, source: StorageOptions, apart_from: Sequence[StorageOptions]
) -> TaskEnd:
    def plan() -> tuple[PreparePlan, TokenizerFile]:
        tokenizer = read_tokenizer(request.data)
        files = list_source(request.source, source)
        others = zip(request.apart_from, apart_from, strict=True)
        refuse_shared_files(files, request.source, others)
        return plan_parts(request.source, files, tokenizer.facts, request.data), tokenizer

    return carried_out(plan)


def _make_part(
    shared: TaskEnd, part: Part, uri: str, store: StorageOptions, source: StorageOptions
) -> TaskEnd:
    plan, tokenizer = shared.result

    def make() -> PartResult:
        scratch = cache_folder(os.environ) / _SCRATCH
        make_private_folder(scratch)
        storage = open_storage(uri, store)
        return make_part(plan, part, tokenizer, storage, source, scratch, _no_progress)

    return carried_out(make)


def carried_out(work: Callable[[], Any]) -> TaskEnd:
    """The end of a task with the result of `work`, which is done in this process."""
    os.nice(LOWEST_PRIORITY)
    host = ray.util.get_node_ip_address()
    try:
        return TaskEnd(work())
    except LibraryMissing as error:
        return TaskEnd(unfit=f"on the node {host}: {error}")
    except TransientStorageError as error:
        return TaskEnd(later=f"on the node {host}: {error}")
    except WorkersError as error:
        return TaskEnd(refused=_bounded(str(error)))
    except OSError as error:
        what = error.filename or "a file"
        return TaskEnd(later=f"on the node {host}: {what}: {error.strerror or error}")
    except BaseException as error:  # also a panic of a library that is not written in Python
        _log.exception("a preparation failed")
        return TaskEnd(refused=_unexpected(error))


def _bounded(reason: str) -> str:
    return reason if len(reason) <= _MOST_WORDS else f"{reason[: _MOST_WORDS - 3]}..."


def _unexpected(error: BaseException | None) -> str:
    said = " ".join(str(error).split())[:300]
    return (
        f"an unexpected error ({type(error).__name__}: {said}); look into the file that is named "
        "there, or into the log of Ray's worker"
    )


def _no_progress(nbytes: int) -> None:
    """A part is small: its end is progress enough."""
