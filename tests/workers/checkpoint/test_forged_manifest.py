"""Checkpoints whose manifest promises more than their files hold: refused before anything is
allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint.saved_worlds import save_world

from holdfast_workers.checkpoint.export import plan_export, read_plan
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    content_digest,
    read_manifest,
)
from holdfast_workers.checkpoint.storage import Storage, write_small

MESH = {"dp_shard": 2, "tp": 2}
Tensor = dict[str, Any]


@pytest.fixture
def root(tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path / "checkpoints")


def forged(root: Storage, change: Callable[[dict[str, Any]], None]) -> tuple[Storage, Manifest]:
    """A checkpoint with a changed manifest, whose digest is right again."""
    saved = save_world(root, 7, 1, MESH)
    checkpoint = root.below(saved.folder)
    document = json.loads(checkpoint.read(MANIFEST))
    change(document)
    content = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps({**content, "digest": content_digest(content)})
    write_small(checkpoint, MANIFEST, text.encode())
    return checkpoint, read_manifest(checkpoint)


def weights(document: dict[str, Any]) -> list[Tensor]:
    found = [each for each in document["tensors"] if each["name"].startswith("model.")]
    return [each for each in found if each["name"] == found[0]["name"]]


def of_every_piece(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for piece in weights(document):
            piece.update(values)

    return change


def larger(document: dict[str, Any]) -> None:
    for piece in weights(document):
        piece["global_shape"][0] *= 1000


def one_piece_is_everything(document: dict[str, Any]) -> None:
    """The volume is right, but all pieces lie at one place of the tensor, twice too long."""
    first, *others = weights(document)
    for piece in others:
        piece["offsets"] = first["offsets"]


def larger_than_its_bytes(document: dict[str, Any]) -> None:
    larger(document)
    first, *_ = weights(document)
    for piece in weights(document)[1:]:
        document["tensors"].remove(piece)
    first["offsets"] = [0] * len(first["offsets"])
    first["shape"] = first["global_shape"]


def many_tensors_share_the_same_bytes(document: dict[str, Any]) -> None:
    first = weights(document)[0]
    alone = {"global_shape": first["shape"], "offsets": [0] * len(first["shape"])}
    for number in range(1000):
        document["tensors"].append({**first, **alone, "name": f"{first['name']}.{number}"})


def longer_files(document: dict[str, Any]) -> None:
    """The manifest agrees with itself, and not with the files."""
    first, *others = weights(document)
    for piece in others:
        document["tensors"].remove(piece)
    nbytes = 1 << 32
    for file in document["files"]:
        if file["name"] == first["file"]:
            file["nbytes"] = first["data_offset"] + nbytes
    shape = [nbytes // 4]
    first.update(global_shape=shape, shape=shape, offsets=[0], nbytes=nbytes, dtype="float32")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (larger, "elements are missing"),
        (one_piece_is_everything, "overlap"),
        (larger_than_its_bytes, "has .* bytes, not "),
        (many_tensors_share_the_same_bytes, "tensors of .* bytes together"),
        (of_every_piece(dtype="float16"), "has .* bytes, not "),
        (of_every_piece(global_shape=[1 << 40, -1]), "no shape"),
        (of_every_piece(shape=[2.5, 1]), "no shape"),
        (of_every_piece(offsets=[0]), "no shape"),
        (of_every_piece(nbytes=-8), "lies outside"),
        (of_every_piece(file="absent"), "damaged"),
    ],
)
def test_a_manifest_that_promises_more_than_it_has_is_refused_before_it_is_exported(
    root: Storage, change: Callable[[dict[str, Any]], None], why: str
) -> None:
    with pytest.raises(CheckpointError, match=why):
        plan_export(forged(root, change)[1])


def test_sizes_are_compared_with_the_files_before_anything_is_allocated(root: Storage) -> None:
    checkpoint, manifest = forged(root, longer_files)
    plan_export(manifest)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: \d+ bytes, the manifest says"):
        read_plan(checkpoint)
