"""Replication: the commits that partners receive, and the reports about them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import psutil
import pytest
from tests.support.memory.data_nodes import NBYTES, PATIENT, QUICK, Node
from tests.support.memory.shm import MESH, SECRET, AgentProcess, content, layout_of, write
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_workers.memory import wire
from holdfast_workers.memory.replicate import Replicator
from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.memory.wire import Role, WireRefused
from holdfast_workers.protocol.messages import Partner, Place
from holdfast_workers.state.digest import payload_digest


def _rss(process: psutil.Process) -> int:
    return int(process.memory_info().rss - process.memory_info().shared)


def test_commits_arrive_at_the_partner_with_the_same_bytes(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    segments = {rank: here.worker(rank) for rank in (0, 1)}
    for rank in segments:
        here.replicator.set_partners(rank, (there.partner,))
    for step in (1, 2, 3):
        for rank, segment in segments.items():
            write(segment, 1, step)
            here.replicator.offer(rank, 1, step)

            def replicated(rank: int = rank, step: int = step) -> bool:
                return (rank, 1, step) in here.replicated

            eventually(replicated)
    eventually(lambda: sorted(there.received) == sorted(here.replicated))
    assert there.holds(Place.REPLICA) == [(0, 1, 3), (0, 1, 2), (1, 1, 3), (1, 1, 2)]
    replica = there.store.find(1, Place.REPLICA)
    assert replica is not None
    assert bytes(replica.payload(replica.commits()[0])) == content(NBYTES, 1, 3)
    assert here.lost == []


def _offer(here: Node, segment: Segment, step: int, keep: Commit | None) -> Commit:
    """Commit `step` beside `keep`; returns once the partner has it."""
    commit = write(segment, 1, step, keep=keep)
    here.replicator.offer(0, 1, step)
    eventually(lambda: (0, 1, step) in here.replicated)
    return commit


def test_a_partner_keeps_what_the_owner_keeps(node: Callable[..., Node]) -> None:
    """Steps 30 and 40 of a program, which other ranks could not save, after step 20."""
    here, there = node("a"), node("b")
    segment = here.worker(0)
    here.replicator.set_partners(0, (there.partner,))
    whole = _offer(here, segment, 20, None)
    for step in (30, 40):
        _offer(here, segment, step, whole)
        assert there.holds(Place.REPLICA) == [(0, 1, step), (0, 1, 20)]


def test_a_larger_replica_takes_the_place_of_the_former_with_the_same_step(
    node: Callable[..., Node],
) -> None:
    here, there = node("a"), node("b")
    here.replicator.set_partners(0, (there.partner,))
    _offer(here, here.worker(0), 20, None)
    eventually(lambda: there.received == [(0, 1, 20)])  # the partner answers before it reports
    held: list[list[tuple[int, int, int]]] = []
    there.server._on_replica = lambda *_: held.append(there.holds(Place.REPLICA))
    larger = here.worker(0, 2 * NBYTES)
    whole = write(larger, 1, 20)
    _offer(here, larger, 30, whole)
    eventually(lambda: len(held) == 2)
    assert held == [[(0, 1, 20)], [(0, 1, 30), (0, 1, 20)]]
    assert list(there.store.folder.glob(".*")) == []


def test_a_larger_replica_goes_without_a_step_that_is_damaged_meanwhile(
    node: Callable[..., Node],
) -> None:
    here, there = node("a"), node("b")
    here.replicator.set_partners(0, (there.partner,))
    _offer(here, here.worker(0), 20, None)
    larger = here.worker(0, 2 * NBYTES)
    whole = write(larger, 1, 20)
    larger._slot(whole.slot)[5] ^= 1
    _offer(here, larger, 30, whole)
    assert there.holds(Place.REPLICA) == [(0, 1, 30)]
    assert here.lost == []


def test_a_former_replica_stays_until_the_larger_one_has_a_commit(
    node: Callable[..., Node],
) -> None:
    here, there = node("a"), node("b")
    here.replicator.set_partners(0, (there.partner,))
    _offer(here, here.worker(0), 20, None)
    larger = layout_of(2 * NBYTES)
    assert there.store.prepare_replica(0, larger)
    assert there.holds(Place.REPLICA) == [(0, 1, 20)]
    prepared = there.store.replica_of_size(0, 2 * NBYTES)
    assert there.store.prepare_replica(0, larger)
    assert there.store.replica_of_size(0, 2 * NBYTES) is prepared
    assert not there.store.prepare_replica(0, layout_of(NBYTES))  # the former fits again
    assert there.store.replica_of_size(0, 2 * NBYTES) is None
    assert [path.name for path in there.store.folder.iterdir()] == ["replica-0.seg"]
    assert there.store.prepare_replica(0, larger)
    there.store.keep_only(own=(), replicas=())
    assert list(there.store.folder.iterdir()) == []


def test_only_the_newest_of_many_offers_is_sent(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    segment = here.worker(0)
    here.replicator.set_partners(0, (there.partner,))
    for step in range(1, 101):
        write(segment, 1, step)
        here.replicator.offer(0, 1, step)
    eventually(lambda: (0, 1, 100) in here.replicated)
    assert there.holds(Place.REPLICA)[0] == (0, 1, 100)


def test_a_worker_faster_than_the_link_cannot_starve_replication(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    nbytes = 8_000_000
    segment = here.worker(0, nbytes)
    raw = content(nbytes, 1, 1)
    digest = payload_digest(raw)
    here.replicator.set_partners(0, (there.partner,))
    deadline = time.monotonic() + DEADLINE_S
    step = 0
    while len(here.replicated) < 10:
        step += 1
        with segment.begin(step) as slot:
            slot[:] = raw
        segment.commit(attempt=1, step=step, digest=digest)
        here.replicator.offer(0, 1, step)
        assert time.monotonic() < deadline, f"{len(here.replicated)} replicated of {step} steps"
    assert here.lost == []
    assert here.bad == []


def test_a_commit_is_not_overwritten_while_it_is_sent(node: Callable[..., Node]) -> None:
    here = node("a")
    segment = here.worker(0)
    older = write(segment, 1, 1)
    write(segment, 1, 2)
    with here.replicator.pinned(0, segment, older):
        for step in (3, 4):
            write(segment, 1, step)
        assert segment.is_current(older)
    write(segment, 1, 5)
    assert not segment.is_current(older)


def test_a_push_of_a_fenced_attempt_is_refused(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    segment = here.worker(0)
    here.replicator.set_partners(0, (there.partner,), attempt=1)
    write(segment, 1, 1)
    here.replicator.offer(0, 1, 1)
    eventually(lambda: here.replicated)
    there.server.fence(2)
    write(segment, 1, 2)
    here.replicator.offer(0, 1, 2)
    (link,) = here.replicator._links.values()
    eventually(lambda: not link._pending)
    # The current attempt may push the state that it was restored from.
    write(segment, 2, 3)
    here.replicator.offer(0, 2, 3)
    eventually(lambda: (0, 2, 3) in here.replicated)
    assert there.holds(Place.REPLICA) == [(0, 2, 3), (0, 1, 1)]
    assert here.lost == []


def _push_by_hand(sock: socket.socket, attempt: int, step: int) -> None:
    raw = content(NBYTES, attempt, step)
    header = {"op": "push", "rank": 0, "attempt": attempt, "step": step, "nbytes": NBYTES}
    header |= {"mesh": MESH}
    wire.send_header(sock, {**header, "digest": payload_digest(raw), "credential": attempt})
    assert wire.receive_header(sock)["go"]
    wire.send_payload(sock, raw[: NBYTES // 2])


def test_a_fence_takes_effect_before_and_during_a_push(node: Callable[..., Node]) -> None:
    there = node("b")
    write(there.store.ensure(0, Place.REPLICA, layout_of(NBYTES)), 1, 1)
    with wire.connect(SECRET, "127.0.0.1", there.server.port, Role.PUSH, PATIENT) as sock:
        _push_by_hand(sock, 1, 2)
        there.server.fence(2)
        wire.send_payload(sock, content(NBYTES, 1, 2)[NBYTES // 2 :])
        with pytest.raises(WireRefused, match="fenced"):
            wire.receive_header(sock)
        with pytest.raises(WireRefused, match="fenced"):
            _push_by_hand(sock, 1, 3)
        there.server.fence(1)  # a fence is never lowered
        with pytest.raises(WireRefused, match="fenced"):
            _push_by_hand(sock, 1, 3)
    assert there.holds(Place.REPLICA) == [(0, 1, 1)]
    assert there.received == []


def test_a_state_restored_from_an_older_attempt_may_be_replicated_again(
    node: Callable[..., Node],
) -> None:
    here, there = node("a"), node("b")
    there.server.fence(2)
    write(here.worker(0), 1, 1)
    here.replicator.set_partners(0, (there.partner,), attempt=2)
    here.replicator.offer(0, 1, 1)
    eventually(lambda: here.replicated == [(0, 1, 1)])


def test_a_commit_that_the_partner_already_holds_is_not_sent_again(
    node: Callable[..., Node],
) -> None:
    here, there = node("a"), node("b")
    write(here.worker(0), 1, 1)
    here.replicator.set_partners(0, (there.partner,))
    for times in (1, 2):
        here.replicator.offer(0, 1, 1)

        def replicated(times: int = times) -> bool:
            return len(here.replicated) == times

        eventually(replicated)
    assert there.received == [(0, 1, 1)]


def test_a_replica_rolled_back_to_outlives_the_later_one(node: Callable[..., Node]) -> None:
    """The partner already holds the restored state, and a later one that training abandoned."""
    here, there = node("a"), node("b")
    own = here.worker(0)
    here.replicator.set_partners(0, (there.partner,), attempt=1)
    for step in (10, 15):
        write(own, 1, step)
        here.replicator.offer(0, 1, step)

        def replicated(step: int = step) -> bool:
            return here.replicated[-1:] == [(0, 1, step)]

        eventually(replicated)
    here.replicator.fence(2)
    here.replicator.set_partners(0, (there.partner,), attempt=2)
    here.replicator.offer(0, 1, 10)
    eventually(lambda: here.replicated[-1] == (0, 1, 10))
    replica = there.store.find(0, Place.REPLICA)
    assert replica is not None
    replica.begin(14)
    assert there.holds(Place.REPLICA) == [(0, 1, 10)]


@pytest.mark.parametrize("end", ["fence", "other partners"])
def test_no_report_names_a_former_partner_after_the_partners_changed(
    node: Callable[..., Node], end: str
) -> None:
    """A later report would be taken for a step of the next attempt, or of the next partners."""
    here, there = node("a"), node("b")
    reporting, proceed = threading.Event(), threading.Event()
    order: list[str] = []

    def report(*_what: object) -> None:
        reporting.set()
        assert proceed.wait(DEADLINE_S)
        order.append("reported")

    def change() -> None:
        if end == "fence":
            replicator.fence(2)
        else:
            replicator.set_partners(0, (), attempt=1)
        order.append(end)

    replicator = Replicator(here.store, SECRET, report, lambda *_: None, timeouts=PATIENT)
    write(here.worker(0), 1, 15)
    replicator.set_partners(0, (there.partner,), attempt=1)
    replicator.offer(0, 1, 15)
    assert reporting.wait(DEADLINE_S)
    changing = threading.Thread(target=change)
    changing.start()
    changing.join(0.2)  # would end at once if it did not wait for the report
    proceed.set()
    changing.join(DEADLINE_S)
    replicator.close()
    assert order == ["reported", end]


def test_replicas_of_two_meshes_coexist(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b", "dp_shard=4,tp=1")
    write(there.store.ensure(0, Place.REPLICA, layout_of(64)), 1, 1)
    write(here.worker(0), 2, 9)
    here.replicator.set_partners(0, (there.partner,))
    here.replicator.offer(0, 2, 9)
    eventually(lambda: here.replicated)
    assert there.holds(Place.REPLICA) == [(0, 1, 1)]
    assert [(h.attempt, h.step) for h in there.store.for_mesh(MESH).held(verified=True)] == [(2, 9)]
    assert there.store.meshes() == sorted([MESH, "dp_shard=4,tp=1"])


def test_a_mesh_tag_that_leaves_the_folder_is_refused(node: Callable[..., Node]) -> None:
    server = node("b").server
    with wire.connect(SECRET, "127.0.0.1", server.port, Role.FETCH, PATIENT) as sock:
        wire.send_header(sock, {"mesh": "..", "rank": 0, "place": "own", "attempt": 1, "step": 1})
        with pytest.raises(WireRefused, match="malformed"):
            wire.receive_header(sock)


def test_a_byte_flipped_in_memory_is_not_replicated_but_quarantined(
    node: Callable[..., Node],
) -> None:
    here, there = node("a"), node("b")
    segment = here.worker(0)
    write(segment, 1, 1)
    commit = write(segment, 1, 2)
    segment._slot(commit.slot)[NBYTES - 1] ^= 1
    here.replicator.set_partners(0, (there.partner,))
    here.replicator.offer(0, 1, 2)
    eventually(lambda: here.bad)
    assert here.bad[0].step == 2
    here.replicator.offer(0, 1, 1)
    eventually(lambda: here.replicated == [(0, 1, 1)])
    assert there.holds(Place.REPLICA) == [(0, 1, 1)]
    assert here.lost == []


@pytest.mark.seconds
def test_a_step_counts_as_replicated_when_all_partners_hold_it(
    node: Callable[..., Node], agent: Callable[[str], AgentProcess]
) -> None:
    here, there = node("a", timeouts=QUICK), node("b")
    slow = agent("c")
    segment = here.worker(0)
    here.replicator.set_partners(0, (there.partner, Partner("c", "127.0.0.1", slow.port)))
    write(segment, 1, 1)
    here.replicator.offer(0, 1, 1)
    eventually(lambda: here.replicated == [(0, 1, 1)])
    os.kill(slow.process.pid, signal.SIGSTOP)
    stopped = psutil.Process(slow.process.pid)
    eventually(lambda: stopped.status() == psutil.STATUS_STOPPED)
    write(segment, 1, 2)
    here.replicator.offer(0, 1, 2)
    eventually(lambda: (0, 1, 2) in there.holds(Place.REPLICA))
    assert (
        here.replicated == [(0, 1, 1)] or here.lost
    )  # on a busy machine c may have failed already
    # A failed partner is not waited for: the commits of the others count and are reported again.
    eventually(lambda: (0, "c") in [loss[:2] for loss in here.lost])
    eventually(lambda: here.replicated[1:] == [(0, 1, 2)])
    assert here.others == [True]
    here.replicator.set_partners(0, (there.partner,))
    here.replicator.offer(0, 1, 2)
    eventually(lambda: here.replicated[2:] == [(0, 1, 2)])


@pytest.mark.seconds
def test_a_thousand_commits_leave_no_memory_behind(
    node: Callable[..., Node], agent: Callable[[str], AgentProcess]
) -> None:
    here, there = node("a"), agent("b")
    nbytes = 256_000
    segment = here.worker(0, nbytes)
    raw = content(nbytes, 1, 1)
    digest = payload_digest(raw)
    processes = [psutil.Process(), psutil.Process(there.process.pid)]
    here.replicator.set_partners(0, (Partner("b", "127.0.0.1", there.port),))
    for step in range(1, 1201):
        with segment.begin(step) as slot:
            slot[:] = raw
        segment.commit(attempt=1, step=step, digest=digest)
        here.replicator.offer(0, 1, step)

        def replicated(step: int = step) -> bool:
            return len(here.replicated) == step

        eventually(replicated)
        if step == 200:
            before = [_rss(process) for process in processes]
    grown = [_rss(process) - old for process, old in zip(processes, before, strict=True)]
    assert max(grown) < 512 * 1024, f"grown by {grown} bytes in 1000 commits"
