"""Damaged saved states: each is detected, reported once, and skipped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.nodes.history_proof import assert_same_history
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.spec import CheckpointSpec, DetectionSpec, MemoryTierSpec, RemoteTierSpec

pytestmark = pytest.mark.chaos

VICTIM = 0
REMOTE_EVERY = 5
STOPS_AT = 17
EARLY, LATE = 8, 50


def _segments(run: SupervisedRun, rank: int) -> dict[str, Segment]:
    """The rank's memory checkpoints on all nodes, by file name."""
    paths = run.agents.root.glob(f"*/*/*-{rank}.seg")
    return {path.name: Segment.open(path) for path in paths}


def _flip(segment: Segment, commit: Commit) -> None:
    segment._slot(commit.slot)[commit.nbytes // 2] ^= 4


def _saved(run: SupervisedRun) -> dict[int, Path]:
    """The remote checkpoints by step. Which steps are saved depends on the speed of the savers."""
    return {int(saved["step"]): Path(saved["uri"]) for saved in run.of(EventKind.CHECKPOINT_SAVED)}


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[SupervisedRun]:
    """A run with a rank stopped in the agreement of a step, and no save under way."""
    checkpoint = CheckpointSpec(
        memory=MemoryTierSpec(every_steps=1),
        remote=RemoteTierSpec(every_steps=REMOTE_EVERY, keep=10),
    )
    plan = [{"point": "agree", "rank": VICTIM, "step": STOPS_AT, "action": "stop"}]
    patient = DetectionSpec(hang_floor_s=100.0)  # the stopped rank is not taken for hung
    training = small_training(STEPS, checkpoint=checkpoint, detection=patient)
    # Training waits for the partner however busy the machine is: every step has two copies.
    with supervised(tmp_path, training, chaos=plan, replication_patience_s=1000.0) as run:
        run.wait((tmp_path / "chaos.json.0.0").exists)
        run.wait(lambda: _all_saved(run))
        run.wait(lambda: _newest(run, f"replica-{VICTIM}.seg") == STOPS_AT - 1)
        yield run


def _all_saved(run: SupervisedRun) -> bool:
    folders = list(run.remote_root.glob("step-*"))
    under_way = list(run.agents.root.glob("*/save-*.seg"))
    return len(_saved(run)) == len(folders) > 0 and not under_way


def _newest(run: SupervisedRun, name: str) -> int:
    segment = _segments(run, VICTIM).get(name)
    return max((commit.step for commit in segment.commits()), default=0) if segment else 0


def _damage_all_memory_and_the_newest_remote(run: SupervisedRun) -> None:
    for segment in _segments(run, VICTIM).values():
        for commit in segment.commits():
            _flip(segment, commit)
    shard = _saved(run)[max(_saved(run))] / f"__{VICTIM}_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


@pytest.mark.cell("P4", "node")
def test_a_restore_skips_damaged_states(stopped: SupervisedRun, undisturbed: Undisturbed) -> None:
    _damage_all_memory_and_the_newest_remote(stopped)
    _, *older = sorted(_saved(stopped), reverse=True)
    os.kill(stopped.pids()[VICTIM], signal.SIGKILL)
    assert stopped.wait_end()["outcome"] == "SUCCEEDED", stopped.story()
    assert_same_history(stopped, undisturbed)
    incident = stopped.of(EventKind.INCIDENT_CLOSED)[0]
    assert incident["restored_step"] == max(older, default=0), stopped.story()
    assert incident["tiers"][str(VICTIM)] == ("remote" if older else "init"), stopped.story()
    events = stopped.of(EventKind.CHECKPOINT_BAD)  # an abandoned save has neither uri nor copy
    bad = [
        str(event["uri"] or event["copy"]) for event in events if event["uri"] or event.get("copy")
    ]
    assert len(bad) == len(set(bad)) == 5, stopped.story()


def test_removed_memory_checkpoints_are_recreated(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """As systemd-logind removes files under /dev/shm when their user logs out (RemoveIPC)."""
    plan = [{"point": "forward", "rank": 1, "step": LATE, "action": "kill"}]
    with supervised(tmp_path, small_training(STEPS), chaos=plan) as run:
        run.wait_step(EARLY)
        files = list(run.agents.root.glob("*/*/*.seg"))
        assert len(files) == 2 * run.training.parallel.world_size
        for file in files:
            file.unlink()
        assert run.newest_step() < LATE - 1
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        (incident,) = run.of(EventKind.INCIDENT_CLOSED)
        assert incident["restored_step"] >= LATE - 10, run.story()
        assert set(incident["tiers"].values()) <= {"live", "own_ram", "partner_ram"}, run.story()
