"""The queue of copies to save: supersession, retries and the end of an outage."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.agent.save_backlog import CRASHES, LONGEST_PAUSE_S, QueuedCopy, SaveBacklog
from holdfast_workers.protocol.processes import FrozenCopy


def _copy(step: int, rank: int = 0) -> QueuedCopy:
    return QueuedCopy(FrozenCopy(f"save-{rank}-{step}-1.seg", rank, attempt=1, step=step))


def test_one_copy_of_a_rank_is_saved_while_the_newest_waits() -> None:
    backlog = SaveBacklog()
    backlog.add(_copy(10))
    (running,) = backlog.start_due(0.0)
    assert backlog.add(_copy(20)) is None
    superseded = backlog.add(_copy(30))
    assert superseded is not None
    assert superseded.frozen.step == 20
    assert backlog.start_due(0.0) == []
    backlog.saved(running)
    assert [copy.frozen.step for copy in backlog.start_due(0.0)] == [30]


def test_a_late_copy_does_not_supersede_a_newer_copy() -> None:
    backlog = SaveBacklog()
    backlog.add(_copy(10))
    backlog.start_due(0.0)
    backlog.add(_copy(30))
    late = _copy(20)
    assert backlog.add(late) is late
    assert {path.split("-")[2] for path in backlog.paths} == {"10", "30"}


def test_a_copy_whose_savers_keep_dying_is_given_up() -> None:
    backlog = SaveBacklog()
    backlog.add(_copy(10))
    for _ in range(CRASHES - 1):
        (copy,) = backlog.start_due(0.0)
        assert backlog.crashed(copy, 0.0) is None
    (copy,) = backlog.start_due(0.0)
    assert backlog.crashed(copy, 0.0) is copy
    assert backlog.paths == set()


@given(outage=st.integers(1, 60), every=st.integers(1, 7), data=st.data())
def test_after_an_outage_all_ranks_save_the_same_newest_step(
    outage: int, every: int, data: st.DataObject
) -> None:
    """Four ranks with pauses of their own, one second per tick; then the storage accepts every
    save."""
    ranks = range(4)
    nodes = {rank: SaveBacklog() for rank in ranks}
    saved: dict[int, list[int]] = {rank: [] for rank in ranks}
    given_up = dict.fromkeys(ranks, 0)
    newest = 0
    for now in range(outage):
        if now % every == 0:
            newest = now + 1
            for rank in ranks:
                given_up[rank] += nodes[rank].add(_copy(newest, rank)) is not None
        for rank in ranks:
            assert len(nodes[rank].paths) <= 2
            for copy in nodes[rank].start_due(float(now)):
                jitter = data.draw(st.floats(0, 1))
                given_up[rank] += nodes[rank].refused(copy, float(now), jitter) is not None
    after = outage + LONGEST_PAUSE_S
    for rank in ranks:
        due = nodes[rank].next_due()
        assert due is not None
        assert due <= after
        for copy in nodes[rank].start_due(after):
            saved[rank].append(copy.frozen.step)
            nodes[rank].saved(copy)
        assert nodes[rank].paths == set()
        assert nodes[rank].next_due() is None
    assert saved == {rank: [newest] for rank in ranks}
