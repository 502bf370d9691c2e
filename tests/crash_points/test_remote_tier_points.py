"""Crash points of the remote tier: kills, torn writes, power losses and bit flips at every write.

The real saver and finalizer write the checkpoints, once to a disk that keeps only synced data and
once to a bucket. From every state that is left, the real code lists, loads and continues.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint.remote_job import (
    RANKS,
    STEPS,
    Job,
    Saved,
    check,
    go_on,
    loaded,
    payload_at,
)
from tests.support.faults.crash_point_list import CrashPoints, seeded_runs
from tests.support.faults.crash_states import Moment, flipped, put_files, torn
from tests.support.faults.faulty_storage import Bucket, MemoryStorage
from tests.support.faults.power_loss import PowerRecorder

from holdfast_workers.checkpoint import local_files
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.manifest import (
    BadCheckpoint,
    CheckpointError,
    list_checkpoints,
)
from holdfast_workers.checkpoint.retention import quarantine
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.child_programs import saver
from holdfast_workers.memory.segment import Segment

CUTS = 14
LOSSES = 3
GO_ON_EVERY = 12


@pytest.fixture
def saving_job(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(shm / "copies", monkeypatch)


def _history(saving_job: Job, now_holds: Callable[..., None]) -> None:
    """Four checkpoints of two attempts; the third is never completed, the first is retired."""
    saving_job.checkpoint(STEPS[0])
    now_holds(STEPS[0])
    saving_job.checkpoint(STEPS[1])
    now_holds(STEPS[1])
    saving_job.save(STEPS[2], 0)

    saving_job.checkpoint(STEPS[3])
    now_holds(STEPS[3])


def _on_disk(saving_job: Job, root: Path) -> PowerRecorder:
    root.mkdir()
    recorder = PowerRecorder(root, (local_files,))
    saving_job.root = LocalStorage(root / "jobs" / "checkpoints")
    with recorder.watching_syncs(), recorder.recording():
        _history(saving_job, recorder.now_holds)
    return recorder


def _in_bucket(saving_job: Job) -> Bucket:
    bucket = Bucket()
    saving_job.root = MemoryStorage(bucket)
    _history(saving_job, bucket.now_holds)
    return bucket


def _states_on_disk(recorder: PowerRecorder, points: CrashPoints) -> Iterator[Moment]:
    """Every state that a kill may leave, and states that a power loss may leave."""
    for number, moment in enumerate(recorder.moments):
        earlier = recorder.moments[number - 1] if number else moment
        if moment.files != earlier.files:
            yield from torn(earlier, moment, points.random, CUTS)
            yield moment
        for _loss in range(LOSSES):
            files = recorder.disks[number].after_power_loss(points.random)
            yield replace(moment, files=files, line=f"power lost at {moment.line}")


@pytest.mark.slow
@seeded_runs
def test_a_crash_at_any_write_leaves_the_previous_checkpoint_bit_for_bit(
    shm: Path, saving_job: Job, run: int
) -> None:
    points = CrashPoints("remote tier: killed, torn or lost", run)
    recorder = _on_disk(saving_job, shm / "disk")
    states = [(moment, True) for moment in _states_on_disk(recorder, points)]
    states += [(moment, False) for moment in _in_bucket(saving_job).moments]
    for number, (moment, local) in enumerate(states):
        root: Storage
        if local:
            put_files(shm / "work", moment.files)
            root = LocalStorage(shm / "work" / "jobs" / "checkpoints")
        else:
            root = MemoryStorage(Bucket(dict(moment.files)))
        try:
            check(root, STEPS, moment.must_hold)
            if number % GO_ON_EVERY == 0:
                go_on(saving_job, root)
        except (AssertionError, CheckpointError) as error:
            raise AssertionError(f"{moment.line}: {error}") from error
        points.tried += 1
    points.assert_enough()


def _damaged(content: bytes, points: CrashPoints) -> bytes:
    """Flip one bit, truncate, or zero everything after a random byte."""
    at = points.random.randrange(len(content))
    damage = points.random.choice(("flip", "flip", "flip", "cut", "zeros"))
    if damage == "flip":
        return flipped(content, 8 * at + points.random.randrange(8))
    return content[:at] if damage == "cut" else content[:at] + bytes(len(content) - at)


def _restore_newest(root: Storage, known: Collection[Saved]) -> tuple[Saved, int]:
    """Restore as a job does: newest first, quarantining damaged checkpoints. Returns the checkpoint
    that was loaded and the number of damaged ones."""
    bad: list[str] = []
    while True:
        listed = list_checkpoints(root, lambda uri, why: bad.append(uri))
        newest = Saved(listed[0].step, listed[0].attempt)
        assert newest in known
        try:
            for rank in range(RANKS):
                assert loaded(root, newest, rank) == payload_at(newest, rank), "silently wrong"
        except BadCheckpoint as error:
            quarantine(root.below(newest.folder), str(error))
            bad.append(newest.folder)
        else:
            return newest, len(set(bad))


@pytest.mark.seconds
@seeded_runs
def test_a_damaged_object_is_detected_at_the_latest_when_it_is_loaded(
    saving_job: Job, run: int
) -> None:
    points = CrashPoints("remote tier: flipped or cut", run)
    bucket = Bucket()
    saving_job.root = MemoryStorage(bucket)
    older, newer = STEPS[0], STEPS[1]
    saving_job.checkpoint(older)
    saving_job.checkpoint(newer)
    vital = ("manifest.json", ".distcp")  # the files that Holdfast's own loader reads
    for name in [name for name in bucket.objects if name.startswith(newer.folder)]:
        for _point in range(260 if name.endswith(vital) else 50):
            damaged = _damaged(bucket.objects[name], points)
            root = MemoryStorage(Bucket({**bucket.objects, name: damaged}))
            served, bad = _restore_newest(root, (older, newer))
            if damaged != bucket.objects[name] and name.endswith(vital):
                assert (served, bad) == (older, 1), f"{name}: {served} served, {bad} bad"
            else:
                assert (served, bad) == (newer, 0)
            points.tried += 1
        gone = {other: content for other, content in bucket.objects.items() if other != name}
        _restore_newest(MemoryStorage(Bucket(gone)), (older, newer))
    points.assert_enough()


@seeded_runs
def test_an_object_damaged_before_publication_is_never_loaded_with_wrong_bits(
    saving_job: Job, run: int
) -> None:
    """Damage between the savers and the finalizer: a wrong record, a changed shard."""
    points = CrashPoints("remote tier: flipped or cut before publication", run)
    bucket = Bucket()
    saving_job.root = MemoryStorage(bucket)
    older, newer = STEPS[0], STEPS[1]
    saving_job.checkpoint(older)
    for rank in range(RANKS):
        saving_job.save(newer, rank)
    for name in [name for name in bucket.objects if name.startswith(newer.folder)]:
        for _point in range(120):
            damaged = _damaged(bucket.objects[name], points)
            saving_job.root = MemoryStorage(Bucket({**bucket.objects, name: damaged}))
            with contextlib.suppress(CheckpointError):
                saving_job.finalize(newer)
            served, _bad = _restore_newest(saving_job.root, (older, newer))
            assert served == older or damaged == bucket.objects[name]
            points.tried += 1
    points.assert_enough()


def test_a_frozen_copy_that_changes_during_its_save_is_not_published(
    saving_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket()
    saving_job.root = MemoryStorage(bucket)

    def flip_and_save(at: Storage, payload: memoryview, layout: Any, rank: int, *rest: int) -> Any:
        """Flip the bit after any check that the saver makes at its start."""
        saved = STEPS[0]
        with Segment.open(saving_job.copy_path(saved, rank)) as copy:
            copy._slot(copy.commits()[0].slot)[5] ^= 1
        return save_shard(at, payload, layout, rank, *rest)

    monkeypatch.setattr(saver, "save_shard", flip_and_save)
    with pytest.raises(ValueError, match="digest"):
        saving_job.save(STEPS[0], 0)
    assert not any(name.endswith(".record.json") for name in bucket.objects)
