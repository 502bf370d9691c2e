"""Reads the weights of a published model on the cluster: first its configuration and headers, then
a digest of each few megabytes, and last the manifest is written.

Every job reads the whole folder once, unless another asks for it at the same time: what stands in
a job's record are digests of the bytes that were there then.
"""

from __future__ import annotations

import time

from holdfast_service.cluster.preparation_tasks import TaskSlots
from holdfast_service.cluster.preparation_work import PreparationWork
from holdfast_service.cluster.weights_tasks import (
    begin_digest,
    begin_folder,
    begin_publication,
    weight_set,
)
from holdfast_service.job_model.preparation import WeightsProgress, WeightsRequest
from holdfast_service.remote_tier.location import storage_options
from holdfast_workers.checkpoint.storage import joined
from holdfast_workers.published.folder import PublishedFolder
from holdfast_workers.published.weight_set import WeightFile
from holdfast_workers.spec import PublishedSpec


class WeightsWork(PreparationWork[WeightsProgress]):
    """The preparation of one folder."""

    remedy = "give the nodes more memory, or copy the folder again"

    def __init__(
        self, request: WeightsRequest, credentials: dict[str, str] | None, slots: TaskSlots
    ) -> None:
        super().__init__(WeightsProgress(request.folder), slots)
        self._request = request
        self._store = storage_options(request.remote, credentials)

    def progress(self) -> WeightsProgress:
        return self._with_silence("read")

    def _prepare(self) -> None:
        found: PublishedFolder = self._carry_out_one(
            lambda node: begin_folder(node, self._request), "read its configuration"
        )
        total = sum(size for _, size in found.files)
        self._note(total_bytes=total, done_bytes=0, family=found.config.family)
        files = self._digests(found)
        made = weight_set(
            found,
            (files[name] for name, _ in found.files),
            (files[name] for name in found.others),
        )
        content, digest = made.encode(), made.digest
        published = PublishedSpec(
            uri=joined(self._request.root, digest),
            digest=digest,
            manifest_bytes=len(content),
            nbytes=sum(file.nbytes for file in made.files),
            dtype=found.dtype,
            positions=found.config.positions,
            config=dict(found.document) if self._request.family == "transformers" else None,
        )
        self._carry_out_one(
            lambda node: begin_publication(node, self._request, made, published.uri, self._store),
            "wrote its manifest",
        )
        self._note(waits="", fields=dict(found.config.fields), published=published)

    def _digests(self, found: PublishedFolder) -> dict[str, WeightFile]:
        """By the names of the files."""
        sizes = {**dict.fromkeys(found.others, 0), **dict(found.files)}
        made: dict[str, WeightFile] = {}
        began = time.monotonic()

        def ended(name: str, file: WeightFile) -> None:
            made[name] = file
            done = sum(sizes[each] for each in made)
            took_s = max(time.monotonic() - began, 1e-3)
            self._note(waits="", done_bytes=done, bytes_per_s=done / took_s)

        self._carry_out(
            sizes,
            lambda node, name: begin_digest(node, self._request.folder, name),
            ended,
            lambda name: f"read {name}",
        )
        return made
