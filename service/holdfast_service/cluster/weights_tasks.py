"""The tasks that read the folder of a published model. They run as those for token sets do:
see `preparation_tasks`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast_service.cluster.node_tasks import task_on
from holdfast_service.cluster.preparation_tasks import TaskEnd, carried_out
from holdfast_service.cluster.runtime_env import with_code
from holdfast_service.job_model.preparation import WeightsRequest
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import write_small
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.published.folder import PublishedFolder, read_folder
from holdfast_workers.published.weight_files import UnfitWeights
from holdfast_workers.published.weight_set import (
    MANIFEST,
    OTHERS,
    WeightFile,
    WeightSet,
    digest_file,
)


def begin_folder(node: str, request: WeightsRequest) -> Any:
    """The reference of the end of a task with a `PublishedFolder`."""
    return task_on(node, _read_published, with_code(None)).remote(request)


def begin_digest(node: str, folder: str, name: str) -> Any:
    """The reference of the end of a task with a `WeightFile`."""
    return task_on(node, _digest_weights, with_code(None)).remote(folder, name)


def begin_publication(
    node: str, request: WeightsRequest, weights: WeightSet, uri: str, store: StorageOptions
) -> Any:
    """The reference of the end of a task with True: the small files are at `uri`, and then the
    manifest."""
    return task_on(node, _publish_weights, with_code(None)).remote(request, weights, uri, store)


def weight_set(
    found: PublishedFolder, files: Iterable[WeightFile], others: Iterable[WeightFile]
) -> WeightSet:
    """Equal for folders with equal content."""
    tensors = tuple(found.tensors[name] for name in sorted(found.tensors))
    return WeightSet(found.document, tuple(files), tensors, tuple(others))


def _read_published(request: WeightsRequest) -> TaskEnd:
    return carried_out(lambda: _read(request))


def _digest_weights(folder: str, name: str) -> TaskEnd:
    return carried_out(lambda: digest_file(Path(folder, name), _no_progress))


def _publish_weights(
    request: WeightsRequest, weights: WeightSet, uri: str, store: StorageOptions
) -> TaskEnd:
    path = Path(request.folder)

    def publish() -> bool:
        # The headers were read before the digests were made.
        if weight_set(_read(request), weights.files, weights.others) != weights:
            raise _changed(path)
        storage = open_storage(uri, store)
        for file in weights.others:
            content = (path / file.name).read_bytes()
            if WeightFile.of(file.name, content) != file:
                raise _changed(path / file.name)
            write_small(storage, f"{OTHERS}/{file.name}", content)
        write_small(storage, MANIFEST, weights.encode())
        return True

    return carried_out(publish)


def _read(request: WeightsRequest) -> PublishedFolder:
    return read_folder(Path(request.folder), request.family, request.dtype)


def _changed(path: Path) -> UnfitWeights:
    return UnfitWeights(f"{path} changes while it is read: submit the job once it is whole")


def _no_progress(nbytes: int) -> None:
    """The end of a file is progress enough."""
