"""Carrying out retention in the remote tier; what stays and what goes is `retention_rules`.

Never removed besides: what has been quarantined, and what a mark has come to since it was decided.
A removal begins with the manifest, so that one which is broken off leaves nothing that looks
complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from holdfast_workers.checkpoint.manifest import (
    FOLDER_NAME,
    MANIFEST,
    QUARANTINED,
    BadCheckpoint,
    Manifest,
    checkpoint_folder,
    list_checkpoints,
    verify,
)
from holdfast_workers.checkpoint.marks import marks_among, remove_unmarked
from holdfast_workers.checkpoint.retention_rules import Stored, doomed
from holdfast_workers.checkpoint.storage import ObjectExists, Storage
from holdfast_workers.spec import RemoteTierSpec


def quarantine(at: Storage, why: str) -> None:
    """Take a checkpoint out of what is listed, keeping it as evidence. One that has been removed
    meanwhile leaves nothing to keep."""
    if MANIFEST not in at.objects():
        return
    with contextlib.suppress(ObjectExists):  # the first reason stays
        at.put_new(QUARANTINED, f"{why}\n".encode())


def retain(
    root: Storage,
    rules: RemoteTierSpec,
    *,
    current_attempt: int,
    unfinished: Collection[tuple[int, int]] = (),
) -> dict[str, str]:
    """Remove what the rules do not keep: names of the folders, and why they went. What is
    `unfinished`, as (step, attempt), is to be published yet, and stays.

    Reads the newest checkpoint through, but only if a complete one is to go.
    """

    def is_whole(one: Stored) -> bool:
        try:
            verify(root.below(checkpoint_folder(one.step, one.attempt)))
        except BadCheckpoint:
            return False
        return True

    removed = {}
    found = [one for one in _shelf(root) if one.complete or one.age not in unfinished]
    for one in doomed(found, rules, current_attempt=current_attempt, is_whole=is_whole):
        folder = checkpoint_folder(one.stored.step, one.stored.attempt)
        if remove_unmarked(root.below(folder)):
            removed[folder] = one.why
    return removed


def _shelf(root: Storage) -> list[Stored]:
    """Complete checkpoints, and folders that are none yet; damaged manifests are left alone."""
    complete = {manifest.folder: manifest for manifest in list_checkpoints(root)}
    names = root.objects()
    found = []
    for folder in root.folders():
        name = FOLDER_NAME.fullmatch(folder)
        if folder in complete:
            found.append(_stored(complete[folder], names))
        elif name and {f"{folder}/{MANIFEST}", f"{folder}/{QUARANTINED}"}.isdisjoint(names):
            found.append(Stored(int(name[1]), int(name[2]), complete=False))
    return found


def _stored(manifest: Manifest, names: dict[str, int]) -> Stored:
    marks = marks_among(names, manifest.folder)
    return Stored(
        step=manifest.step,
        attempt=manifest.attempt,
        metrics=manifest.metrics,
        pinned=marks.pinned,
        needed=bool(marks.needed_by),
    )
