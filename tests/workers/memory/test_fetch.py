"""Fetching a commit from another node: it is the right one and complete, or the fetch fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from tests.support.memory.data_nodes import NBYTES, Node, source_at
from tests.support.memory.shm import SECRET, AgentProcess, content, layout_of, write
from tests.support.waiting import DEADLINE_S

from holdfast_workers.memory.fetch import BadShard, SourceLost, fetch
from holdfast_workers.memory.segment import Commit
from holdfast_workers.memory.segment_store import SegmentBusy
from holdfast_workers.memory.wire import Timeouts
from holdfast_workers.protocol.messages import Place
from holdfast_workers.state.digest import payload_digest


@pytest.mark.parametrize("place", list(Place))
def test_a_commit_is_fetched_into_the_own_segment(node: Callable[..., Node], place: Place) -> None:
    here, there = node("a"), node("b")
    commit = write(there.store.ensure(5, place, layout_of(NBYTES)), 1, 9)
    source = source_at(there.server.port, 9, place, commit.digest)
    held = fetch(SECRET, source, 5, here.store, DEADLINE_S)
    assert (held.rank, held.step, held.attempt, held.place) == (5, 9, 1, Place.OWN)
    assert here.holds(Place.OWN) == [(5, 1, 9)]
    segment = here.store.find(5, Place.OWN)
    assert segment is not None
    assert segment.layout == layout_of(NBYTES)
    assert bytes(segment.payload(segment.commits()[0])) == content(NBYTES, 1, 9)
    there.close()
    assert (
        fetch(SECRET, source, 5, here.store, DEADLINE_S) == held
    )  # already present: no connection is made


def test_of_two_saves_of_a_step_the_wanted_one_is_fetched(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    segment = there.worker(0)
    commits: list[Commit] = []
    for value in (1, 2):
        keep = commits[-1] if commits else None
        segment.begin(9, keep=keep)[:] = raw = bytes([value]) * NBYTES
        commits.append(segment.commit(attempt=1, step=9, digest=payload_digest(raw)))
    for commit in commits:
        source = source_at(there.server.port, 9, Place.OWN, commit.digest)
        assert fetch(SECRET, source, 0, here.store, DEADLINE_S).digest == commit.digest


def test_fetching_a_commit_that_is_not_held_raises(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    write(there.worker(0), 1, 9)
    for source in (
        source_at(there.server.port, 8),
        source_at(there.server.port, 9, attempt=2),
        source_at(there.server.port, 9, Place.REPLICA),
    ):
        with pytest.raises(SourceLost, match="not_held"):
            fetch(SECRET, source, 0, here.store, DEADLINE_S)
    assert here.store.held() == []


def test_a_fetch_into_a_segment_that_is_being_written_raises(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    write(there.worker(0), 1, 9)
    here.store._busy_timeout_s = 0.05
    with here.store.writing(0, Place.OWN), pytest.raises(SegmentBusy):
        fetch(SECRET, source_at(there.server.port, 9), 0, here.store, DEADLINE_S)
    assert here.store.held() == []


def test_a_byte_flipped_at_the_source_is_rejected(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    segment = there.worker(0)
    commit = write(segment, 1, 9)
    segment._slot(commit.slot)[3] ^= 1
    with pytest.raises(BadShard):
        fetch(SECRET, source_at(there.server.port, 9), 0, here.store, DEADLINE_S)
    with pytest.raises(BadShard, match="expected"):
        fetch(SECRET, source_at(there.server.port, 9, digest="ab" * 16), 0, here.store, DEADLINE_S)
    assert here.store.held() == []


def test_a_fetch_from_a_stopped_source_ends_within_its_timeout(
    node: Callable[..., Node], agent: Callable[[str], AgentProcess]
) -> None:
    here, stopped = node("a"), agent("b")
    os.kill(stopped.process.pid, signal.SIGSTOP)
    hour = Timeouts(3600.0, 3600.0, 3600.0)
    with pytest.raises(SourceLost):
        fetch(SECRET, source_at(stopped.port, 9), 0, here.store, 0.2, timeouts=hour)
