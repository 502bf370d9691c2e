"""A small remote tier of a job, and the invariants that hold for it after a crash.

The real saver and finalizer write it; the real code lists and loads it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.checkpoint.saved_worlds import global_state, layout_of, payload_of
from tests.support.nodes.agent_config import agent_config

from holdfast_workers.checkpoint.load import load_state
from holdfast_workers.checkpoint.manifest import checkpoint_folder, list_checkpoints
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.child_programs import saver
from holdfast_workers.memory.segment import Segment
from holdfast_workers.protocol.commands import FinalizeCheckpoint, TidyRemoteTier
from holdfast_workers.protocol.processes import FrozenCopy, TidierJob
from holdfast_workers.state.digest import payload_digest

MESH = {"dp_shard": 2, "tp": 1}
RANKS = 2
KEEP = 2
CONFIG = agent_config(
    Path("/unused"), mesh=MESH, training={"checkpoint": {"remote": {"keep": KEEP}}}
).zygote_config


@dataclass(frozen=True, order=True)
class Saved:
    step: int
    attempt: int

    @property
    def folder(self) -> str:
        return checkpoint_folder(self.step, self.attempt)


STEPS = (Saved(1, 1), Saved(2, 1), Saved(3, 1), Saved(4, 2))


def payload_at(saved: Saved, rank: int) -> bytes:
    return bytes(payload_of(layout_of(MESH, rank), global_state(saved.step), rank))


class Job:
    """A job's remote tier; runs the programs that its agents fork in this process."""

    def __init__(self, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copies = copies
        self._copies.mkdir(exist_ok=True)
        self.root: Storage
        monkeypatch.setattr(saver, "_root", lambda _config: self.root)

    def save(self, saved: Saved, rank: int) -> None:
        path = self.copy_path(saved, rank)
        if not path.exists():
            payload = payload_at(saved, rank)
            with Segment.create(path, layout_of(MESH, rank)) as copy:
                with copy.begin(saved.step) as slot:
                    slot[:] = payload
                digest = payload_digest(payload)
                copy.commit(attempt=saved.attempt, step=saved.step, digest=digest)
        with _control() as end:
            saver.save(end, FrozenCopy(str(path), rank, saved.attempt, saved.step), CONFIG)

    def copy_path(self, saved: Saved, rank: int) -> Path:
        """The path of the frozen copy that a worker leaves for the saver."""
        return self._copies / f"{saved.folder}-{rank}.seg"

    def finalize(self, saved: Saved) -> None:
        with _control() as end:
            saver.finalize(end, FinalizeCheckpoint("n0", saved.step, saved.attempt), CONFIG)
        self.tidy(saved)

    def tidy(self, saved: Saved) -> None:
        command = TidyRemoteTier("n0", saved.attempt, saved.step, (), frozenset())
        with _control() as end:
            saver.tidy(end, TidierJob(command, 1), CONFIG)

    def checkpoint(self, saved: Saved) -> None:
        for rank in range(RANKS):
            self.save(saved, rank)
        self.finalize(saved)


@contextlib.contextmanager
def _control() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours


def loaded(root: Storage, saved: Saved, rank: int) -> bytes:
    layout = layout_of(MESH, rank)
    payload = memoryview(bytearray(layout.payload_bytes))
    load_state(root.below(saved.folder), layout, payload, mesh=MESH, rank=rank)
    return bytes(payload)


def check(root: Storage, known: Collection[Saved], must_hold: Collection[Saved]) -> None:
    """Check after a crash: listed checkpoints were saved and load bit for bit, and `must_hold` is
    listed."""
    bad: list[str] = []
    listed = [
        Saved(manifest.step, manifest.attempt)
        for manifest in list_checkpoints(root, lambda uri, why: bad.append(f"{uri}: {why}"))
    ]
    assert bad == [], "a crash was taken for damage"
    assert set(listed) <= set(known), f"listed: {listed}"
    assert set(must_hold) <= set(listed), f"lost: of {must_hold} only {listed} exist"
    for saved in listed:
        for rank in range(RANKS):
            assert loaded(root, saved, rank) == payload_at(saved, rank), (
                f"different bytes in {saved}"
            )


def go_on(job: Job, root: Storage) -> None:
    """Save the next attempt's checkpoints; they count, and nothing of the crash remains."""
    job.root = root
    following = [Saved(9, 7), Saved(10, 7)]
    for saved in following:
        job.checkpoint(saved)
    check(root, following, following)
    assert root.folders() == [saved.folder for saved in following], "left over"
