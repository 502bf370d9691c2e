from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from tests.support.checkpoint.saved_worlds import (
    STATE,
    global_state,
    layout_of,
    payload_of,
    save_shards,
    save_world,
    small_state,
)
from torch.distributed.checkpoint import FileSystemReader

from holdfast_workers.checkpoint.load import load_state, load_whole_state
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    BadCheckpoint,
    CheckpointError,
    CheckpointExists,
    IncompatibleCheckpoint,
    IncompleteCheckpoint,
    checkpoint_folder,
    list_checkpoints,
    read_manifest,
    verify,
)
from holdfast_workers.checkpoint.publish import finalize
from holdfast_workers.checkpoint.storage import ObjectExists, Storage, write_small
from holdfast_workers.state.layout import SMALL_STATE, StateLayout

DP2_TP2 = {"dp_shard": 2, "tp": 2}
MESHES = [DP2_TP2, {"dp_shard": 4, "tp": 1}, {"dp_shard": 1, "tp": 4}, {"dp_shard": 1, "tp": 1}]


def _saved(root: Storage, step: int = 7, attempt: int = 1) -> Storage:
    return root.below(save_world(root, step, attempt, DP2_TP2).folder)


def _loaded(checkpoint: Storage, mesh: dict[str, int], rank: int) -> tuple[bytes, list[str]]:
    layout = layout_of(mesh, rank)
    payload = memoryview(bytearray(layout.payload_bytes))
    missing = load_state(checkpoint, layout, payload, mesh=mesh, rank=rank)
    return bytes(payload), missing


@pytest.mark.parametrize("saved_on", MESHES, ids=str)
@pytest.mark.parametrize("loaded_on", MESHES, ids=str)
def test_any_mesh_loads_what_any_mesh_saved(
    tmp_path: Path, saved_on: dict[str, int], loaded_on: dict[str, int]
) -> None:
    root = LocalStorage(tmp_path)
    checkpoint = root.below(save_world(root, 7, 1, saved_on).folder)
    _check_loaded(checkpoint, saved_on, loaded_on)


def test_a_mesh_loads_from_a_bucket_the_state_of_another_mesh(s3_root: Storage) -> None:
    checkpoint = _saved(s3_root)
    for mesh in (DP2_TP2, {"dp_shard": 1, "tp": 4}):
        _check_loaded(checkpoint, DP2_TP2, mesh)


def _check_loaded(checkpoint: Storage, saved_on: dict[str, int], loaded_on: dict[str, int]) -> None:
    for rank in range(loaded_on["dp_shard"] * loaded_on["tp"]):
        layout = layout_of(loaded_on, rank)
        expected = bytearray(payload_of(layout, global_state(), rank))
        got, missing = _loaded(checkpoint, loaded_on, rank)
        if saved_on != loaded_on:
            assert missing == [SMALL_STATE]
            expected[layout.tensors[-1].offset :] = bytes(len(expected) - layout.tensors[-1].offset)
        else:
            assert missing == []
        assert got == bytes(expected)


def test_an_entry_that_was_not_saved_is_named_and_left_unchanged(root: Storage) -> None:
    checkpoint = _saved(root)
    layout = layout_of(DP2_TP2, 0)
    first = layout.tensors[0]
    renamed = replace(first, name="model.unheard_of")
    changed = StateLayout((renamed, *layout.tensors[1:]), layout.payload_bytes)
    payload = memoryview(bytearray(b"\7" * layout.payload_bytes))
    assert load_state(checkpoint, changed, payload, mesh=DP2_TP2, rank=0) == ["model.unheard_of"]
    with pytest.raises(IncompatibleCheckpoint, match=r"has no model\.unheard_of"):
        load_whole_state(checkpoint, changed, payload, mesh=DP2_TP2, rank=0)
    assert bytes(payload[: first.nbytes]) == b"\7" * first.nbytes


def test_a_tensor_without_elements_is_in_no_checkpoint_and_not_missed(root: Storage) -> None:
    checkpoint = _saved(root)
    layout = layout_of(DP2_TP2, 0)
    nowhere: dict[str, Any] = {"global_shape": (0, 8), "offsets": (0, 0), "shape": (0, 8)}
    empty = replace(layout.tensors[0], name="model.none", nbytes=0, **nowhere)
    with_empty = StateLayout((*layout.tensors, empty), layout.payload_bytes)
    payload = memoryview(bytearray(layout.payload_bytes))
    load_whole_state(checkpoint, with_empty, payload, mesh=DP2_TP2, rank=0)
    assert bytes(payload) == _loaded(checkpoint, DP2_TP2, 0)[0]


def test_another_models_shape_is_refused(root: Storage) -> None:
    checkpoint = _saved(root)
    layout = layout_of(DP2_TP2, 0)
    first = layout.tensors[0]
    other = replace(first, global_shape=(13, 8))
    changed = StateLayout((other, *layout.tensors[1:]), layout.payload_bytes)
    payload = memoryview(bytearray(layout.payload_bytes))
    with pytest.raises(IncompatibleCheckpoint, match=r"model\.embed"):
        load_state(checkpoint, changed, payload, mesh=DP2_TP2, rank=0)


def test_stock_torch_reads_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = _saved(LocalStorage(tmp_path))
    folder = Path(checkpoint.uri)
    state = {name: torch.zeros(shape) for name, (shape, _dp, _tp) in STATE.items()}
    state[f"{SMALL_STATE}.rank2"] = torch.zeros(len(small_state(2)), dtype=torch.uint8)
    stock.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    for name, expected in global_state().items():
        assert np.array_equal(state[name].numpy(), expected)
    assert bytes(state[f"{SMALL_STATE}.rank2"].numpy()) == small_state(2)


def test_loading_never_opens_the_pickle(tmp_path: Path) -> None:
    checkpoint = _saved(LocalStorage(tmp_path))
    folder = Path(checkpoint.uri)
    trap = tmp_path / "trapped"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(trap),)

    (folder / ".metadata").write_bytes(pickle.dumps(Trap()))
    _loaded(checkpoint, DP2_TP2, 1)
    verify(checkpoint)
    assert not trap.exists()


def test_a_flipped_byte_is_detected_and_its_file_named(tmp_path: Path) -> None:
    checkpoint = _saved(LocalStorage(tmp_path))
    folder = Path(checkpoint.uri)
    victim = folder / "__2_0.distcp"
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(raw)
    with pytest.raises(BadCheckpoint, match="__2_0"):
        verify(checkpoint)
    with pytest.raises(BadCheckpoint, match="__2_0"):
        _loaded(checkpoint, DP2_TP2, 2)
    _loaded(checkpoint, {"dp_shard": 2, "tp": 2}, 1)  # does not need the damaged file


def _flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


def _zeroed(content: bytes, at: int) -> bytes:
    return content[:at] + bytes(len(content) - at)


def _cut(content: bytes, at: int) -> bytes:
    return content[:at]


def _grown(content: bytes, at: int) -> bytes:
    return content + bytes(at)


@pytest.mark.parametrize("damage", [_flipped, _zeroed, _cut, _grown])
def test_no_damage_anywhere_loads_silently(
    tmp_path: Path, damage: Callable[[bytes, int], bytes]
) -> None:
    """torch's own reader has no digests. `.metadata` is for other programs, and never opened."""
    checkpoint, places = _saved(LocalStorage(tmp_path)), random.Random(3)
    for name in ("__0_0.distcp", MANIFEST):
        path = Path(checkpoint.uri) / name
        whole = path.read_bytes()
        for at in (places.randrange(len(whole)) for _ in range(25)):
            if damage(whole, at) != whole:
                path.write_bytes(damage(whole, at))
                with pytest.raises(CheckpointError):
                    _loaded(checkpoint, DP2_TP2, 0)
        path.unlink()
        with pytest.raises(CheckpointError):
            _loaded(checkpoint, DP2_TP2, 0)
        path.write_bytes(whole)
    _loaded(checkpoint, DP2_TP2, 0)


def test_a_damaged_manifest_is_reported_instead_of_listed(root: Storage) -> None:
    good = save_world(root, 5, 1, DP2_TP2)
    bad = _saved(root)
    write_small(bad, MANIFEST, bad.read(MANIFEST).replace(b'"step": 7', b'"step": 9'))
    reported: list[str] = []
    listed = list_checkpoints(root, lambda uri, _reason: reported.append(uri))
    assert [manifest.uri for manifest in listed] == [good.uri]
    assert reported == [bad.uri]


@pytest.mark.slow
def test_a_manifest_cannot_lead_out_of_its_folder(root: Storage) -> None:
    checkpoint = root.below(checkpoint_folder(7, 1))
    records = save_shards(checkpoint, DP2_TP2)
    records[0]["name"] = "../../etc/passwd"
    for tensor in records[0]["tensors"]:
        tensor["file"] = records[0]["name"]
    with pytest.raises(BadCheckpoint, match="passwd"):
        finalize(checkpoint, records, DP2_TP2, {})


def test_nothing_is_published_while_a_rank_or_a_box_is_missing(root: Storage) -> None:
    checkpoint = root.below(checkpoint_folder(7, 1))
    records = save_shards(checkpoint, DP2_TP2)
    with pytest.raises(IncompleteCheckpoint, match="ranks"):
        finalize(checkpoint, records[:3], DP2_TP2, {})
    with pytest.raises(IncompleteCheckpoint, match="ranks"):
        finalize(checkpoint, [*records[:3], records[0]], DP2_TP2, {})
    holed = json.loads(json.dumps(records))
    del holed[1]["tensors"][0]
    with pytest.raises(IncompleteCheckpoint, match="missing"):
        finalize(checkpoint, holed, DP2_TP2, {})
    mixed = [{**records[0], "attempt": 2}, *records[1:]]
    with pytest.raises(IncompleteCheckpoint, match="several"):
        finalize(checkpoint, mixed, DP2_TP2, {})
    assert list_checkpoints(root) == []
    finalize(checkpoint, records, DP2_TP2, {})
    assert len(list_checkpoints(root)) == 1


def test_a_manifest_is_never_replaced(root: Storage) -> None:
    checkpoint = root.below(checkpoint_folder(7, 1))
    records = save_shards(checkpoint, DP2_TP2)
    first = finalize(checkpoint, records, DP2_TP2, {"job": "a"})
    assert finalize(checkpoint, records[::-1], DP2_TP2, {"job": "a"}) == first
    with pytest.raises(CheckpointExists):
        finalize(checkpoint, records, DP2_TP2, {"job": "b"})
    with pytest.raises(CheckpointExists):
        save_shards(checkpoint, DP2_TP2)
    with pytest.raises(ObjectExists):
        checkpoint.put_new(MANIFEST, b"a second finalizer that saw no manifest yet")
    assert read_manifest(checkpoint) == first


def test_checkpoints_are_listed_newest_first(root: Storage) -> None:
    for step, attempt in ((5, 1), (100, 2), (7, 1), (7, 3)):
        save_world(root, step, attempt, {"dp_shard": 1, "tp": 1})
    write_small(root, "step-00000200.attempt-4/__0_0.distcp", b"not complete")
    listed = [(manifest.step, manifest.attempt) for manifest in list_checkpoints(root)]
    assert listed == [(100, 2), (7, 3), (7, 1), (5, 1)]


def test_checkpoints_are_read_and_exported_without_torch() -> None:
    code = (
        "import sys, holdfast_workers.checkpoint.manifest, holdfast_workers.checkpoint.load, "
        "holdfast_workers.checkpoint.export, holdfast_workers.checkpoint.retention; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.cell("P4", "storage")
@pytest.mark.chaos
def test_a_kill_at_any_moment_of_a_save_leaves_the_previous_one_loadable(tmp_path: Path) -> None:
    """Forked savers are killed at moments spread over a whole save and its publication."""
    mesh = {"dp_shard": 2, "tp": 1}
    root = LocalStorage(tmp_path)
    previous = save_world(root, 1, 1, mesh)
    took_s = []
    for step in (2, 3, 4):
        began = time.monotonic()
        save_world(root, step, 1, mesh, seed=step)
        took_s.append(time.monotonic() - began)
    published = number = 0
    while published < 3:  # kills later and later, until after the publication
        number += 1
        assert number < 300, "no save was ever published"
        step = 4 + number
        pid = os.fork()
        if pid == 0:
            save_world(root, step, 1, mesh, seed=step)
            os._exit(0)
        time.sleep(min(took_s) * number / 8)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        listed = list_checkpoints(root)
        assert previous.folder in [manifest.folder for manifest in listed]
        for manifest in listed:
            verify(root.below(manifest.folder))
        if listed[0].step == step:
            published += 1
            layout = layout_of(mesh, 0)
            got, _ = _loaded(root.below(listed[0].folder), mesh, 0)
            assert got == bytes(payload_of(layout, global_state(step), 0))
    assert number > 8, "no kill happened during a save"
