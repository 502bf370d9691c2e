from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from tests.support.waiting import eventually
from tests.workers.memory.shm import (
    MESH,
    SECRET,
    AgentProcess,
    content,
    layout_of,
    write,
)

from holdfast_workers.digest import payload_digest
from holdfast_workers.memory import wire
from holdfast_workers.memory.fetch import BadShard, SourceLost, fetch
from holdfast_workers.memory.replicate import Replicator
from holdfast_workers.memory.segment import Segment
from holdfast_workers.memory.server import DataServer
from holdfast_workers.memory.store import Quarantined, SegmentStore
from holdfast_workers.memory.wire import Refused, Role, Timeouts, WireError
from holdfast_workers.messages import Partner, Place, Restore, Tier

NBYTES = 200_000
QUICK = Timeouts(connect_s=1.0, handshake_s=1.0, stall_s=1.0, idle_s=30.0)


@dataclass
class Node:
    """One node agent's memory tier, in this process."""

    name: str
    store: SegmentStore
    server: DataServer
    replicator: Replicator
    replicated: list[tuple[int, int, int]] = field(default_factory=list)
    received: list[tuple[int, int, int]] = field(default_factory=list)
    lost: list[tuple[int, str, str]] = field(default_factory=list)
    others: list[bool] = field(default_factory=list)
    bad: list[Quarantined] = field(default_factory=list)

    @classmethod
    def start(cls, root: Path, name: str, mesh: str = MESH) -> Node:
        node: Node
        bad: list[Quarantined] = []
        store = SegmentStore(root / name, mesh, on_bad=bad.append)
        server = DataServer(
            store,
            SECRET,
            "127.0.0.1",
            on_replica=lambda *what: node.received.append(what),
            timeouts=QUICK,
        )
        replicator = Replicator(
            store,
            SECRET,
            lambda *what: node.replicated.append(what),
            lambda rank, partner, why, others: (
                node.others.append(others),
                node.lost.append((rank, partner.agent, why)),
            ),
            timeouts=QUICK,
            retry_s=0.05,
        )
        node = cls(name, store, server, replicator, bad=bad)
        return node

    @property
    def partner(self) -> Partner:
        return Partner(self.name, "127.0.0.1", self.server.port)

    def worker(self, rank: int, nbytes: int = NBYTES) -> Segment:
        return self.store.ensure(rank, Place.OWN, layout_of(nbytes))

    def holds(self, place: Place) -> list[tuple[int, int, int]]:
        every = self.store.held(verified=True)
        return [(h.rank, h.attempt, h.step) for h in every if h.place is place]

    def close(self) -> None:
        self.replicator.close()
        self.server.close()


@pytest.fixture
def node(shm: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(name: str, mesh: str = MESH) -> Node:
        nodes.append(Node.start(shm, name, mesh))
        return nodes[-1]

    before = threading.active_count()
    yield start
    for one in nodes:
        one.close()
    eventually(lambda: threading.active_count() <= before)


@pytest.fixture
def agent(shm: Path) -> Iterator[Callable[[str], AgentProcess]]:
    agents: list[AgentProcess] = []

    def start(name: str) -> AgentProcess:
        agents.append(AgentProcess.start(shm / name))
        return agents[-1]

    yield start
    for one in agents:
        one.end()


def _source(
    port: int, step: int, place: Place = Place.OWN, digest: str = "", attempt: int = 1
) -> Restore:
    return Restore(
        Tier.PARTNER_RAM,
        step,
        attempt=attempt,
        digest=digest,
        agent="source",
        place=place,
        host="127.0.0.1",
        data_port=port,
    )


def _rss(process: psutil.Process) -> int:
    return int(process.memory_info().rss - process.memory_info().shared)


# --- replication --------------------------------------------------------------------------------


def test_commits_arrive_at_the_partner_with_the_same_bytes(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    segments = {rank: here.worker(rank) for rank in (0, 1)}
    for rank in segments:
        here.replicator.set_partners(rank, (there.partner,))
    for step in (1, 2, 3):
        for rank, segment in segments.items():
            write(segment, 1, step)
            here.replicator.offer(rank, 1, step)
            eventually(lambda rank=rank, step=step: (rank, 1, step) in here.replicated)
    assert there.received == here.replicated
    assert there.holds(Place.REPLICA) == [(0, 1, 3), (0, 1, 2), (1, 1, 3), (1, 1, 2)]
    replica = there.store.find(1, Place.REPLICA)
    assert replica is not None
    assert bytes(replica.payload(replica.commits()[0])) == content(NBYTES, 1, 3)
    assert here.lost == []


def test_of_many_offers_the_newest_is_sent(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    segment = here.worker(0)
    here.replicator.set_partners(0, (there.partner,))
    for step in range(1, 101):
        write(segment, 1, step)
        here.replicator.offer(0, 1, step)
    eventually(lambda: (0, 1, 100) in here.replicated)
    assert there.holds(Place.REPLICA)[0] == (0, 1, 100)


def test_a_worker_faster_than_the_link_cannot_starve_it(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    nbytes = 8_000_000
    segment = here.worker(0, nbytes)
    raw = content(nbytes, 1, 1)
    digest = payload_digest(raw)
    here.replicator.set_partners(0, (there.partner,))
    deadline = time.monotonic() + 10
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
    # What the current attempt was restored from may be pushed by that attempt.
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


def test_a_fence_holds_before_and_in_the_middle_of_a_push(node: Callable[..., Node]) -> None:
    there = node("b")
    write(there.store.ensure(0, Place.REPLICA, layout_of(NBYTES)), 1, 1)
    with wire.connect(SECRET, "127.0.0.1", there.server.port, Role.PUSH, QUICK) as sock:
        _push_by_hand(sock, 1, 2)
        there.server.fence(2)
        wire.send_payload(sock, content(NBYTES, 1, 2)[NBYTES // 2 :])
        with pytest.raises(Refused, match="fenced"):
            wire.receive_header(sock)
        with pytest.raises(Refused, match="fenced"):
            _push_by_hand(sock, 1, 3)
        there.server.fence(1)  # a fence never sinks
        with pytest.raises(Refused, match="fenced"):
            _push_by_hand(sock, 1, 3)
    assert there.holds(Place.REPLICA) == [(0, 1, 1)]
    assert there.received == []


def test_an_outage_is_reported_once_however_often_it_is_tried(
    node: Callable[..., Node],
) -> None:
    here = node("a")
    write(here.worker(0), 1, 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        port = listener.getsockname()[1]
        here.replicator.set_partners(0, (Partner("b", "127.0.0.1", port),))
        here.replicator.offer(0, 1, 1)
        for _try in range(4):
            listener.accept()[0].close()
        assert len(here.lost) == 1
        here.replicator.set_partners(0, ())


def test_the_state_restored_from_an_older_attempt_may_be_replicated_anew(
    node: Callable[..., Node],
) -> None:
    here, there = node("a"), node("b")
    there.server.fence(2)
    write(here.worker(0), 1, 1)
    here.replicator.set_partners(0, (there.partner,), attempt=2)
    here.replicator.offer(0, 1, 1)
    eventually(lambda: here.replicated == [(0, 1, 1)])


def test_what_the_partner_holds_already_is_not_sent_again(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    write(here.worker(0), 1, 1)
    here.replicator.set_partners(0, (there.partner,))
    for times in (1, 2):
        here.replicator.offer(0, 1, 1)
        eventually(lambda times=times: len(here.replicated) == times)
    assert there.received == [(0, 1, 1)]


def test_a_replica_gone_back_to_outlives_the_one_after_it(node: Callable[..., Node]) -> None:
    """The partner holds the state restored from already, and a later one off the line."""
    here, there = node("a"), node("b")
    own = here.worker(0)
    here.replicator.set_partners(0, (there.partner,), attempt=1)
    for step in (10, 15):
        write(own, 1, step)
        here.replicator.offer(0, 1, step)
        eventually(lambda step=step: here.replicated[-1:] == [(0, 1, step)])
    here.replicator.fence(2)
    here.replicator.set_partners(0, (there.partner,), attempt=2)
    here.replicator.offer(0, 1, 10)
    eventually(lambda: here.replicated[-1] == (0, 1, 10))
    replica = there.store.find(0, Place.REPLICA)
    assert replica is not None
    replica.begin(14)
    assert there.holds(Place.REPLICA) == [(0, 1, 10)]


@pytest.mark.parametrize("end", ["fence", "other partners"])
def test_what_is_being_told_is_told_before_it_is_out_of_date(
    node: Callable[..., Node], end: str
) -> None:
    """Told later, it would be taken for a step of the next attempt, or of the next partners."""
    here, there = node("a"), node("b")
    telling, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def tell(*_what: int) -> None:
        telling.set()
        assert go_on.wait(10.0)
        order.append("told")

    def turn() -> None:
        if end == "fence":
            replicator.fence(2)
        else:
            replicator.set_partners(0, (), attempt=1)
        order.append(end)

    replicator = Replicator(here.store, SECRET, tell, lambda *_: None, timeouts=QUICK)
    write(here.worker(0), 1, 15)
    replicator.set_partners(0, (there.partner,), attempt=1)
    replicator.offer(0, 1, 15)
    assert telling.wait(10.0)
    turning = threading.Thread(target=turn)
    turning.start()
    turning.join(0.2)  # ends at once where it waits for nobody
    go_on.set()
    turning.join(10.0)
    replicator.close()
    assert order == ["told", end]


def test_replicas_of_two_meshes_lie_beside_each_other(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b", "dp_shard=4,tp=1")
    write(there.store.ensure(0, Place.REPLICA, layout_of(64)), 1, 1)
    write(here.worker(0), 2, 9)
    here.replicator.set_partners(0, (there.partner,))
    here.replicator.offer(0, 2, 9)
    eventually(lambda: here.replicated)
    assert there.holds(Place.REPLICA) == [(0, 1, 1)]
    assert [(h.attempt, h.step) for h in there.store.of(MESH).held(verified=True)] == [(2, 9)]
    assert there.store.meshes() == sorted([MESH, "dp_shard=4,tp=1"])


def test_a_mesh_that_would_lead_elsewhere_is_refused(node: Callable[..., Node]) -> None:
    server = node("b").server
    with wire.connect(SECRET, "127.0.0.1", server.port, Role.FETCH, QUICK) as sock:
        wire.send_header(sock, {"mesh": "..", "rank": 0, "place": "own", "attempt": 1, "step": 1})
        with pytest.raises(Refused, match="malformed"):
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


def test_a_partner_that_dies_is_reported_once_and_another_takes_over(
    node: Callable[..., Node], agent: Callable[[str], AgentProcess]
) -> None:
    here, spare = node("a"), node("c")
    dying = agent("b")
    segment = here.worker(0)
    here.replicator.set_partners(0, (Partner("b", "127.0.0.1", dying.port),))
    write(segment, 1, 1)
    here.replicator.offer(0, 1, 1)
    eventually(lambda: here.replicated == [(0, 1, 1)])
    dying.end()
    write(segment, 1, 2)
    here.replicator.offer(0, 1, 2)
    eventually(lambda: here.lost)
    write(segment, 1, 3)
    here.replicator.offer(0, 1, 3)
    here.replicator.set_partners(0, (spare.partner,))
    here.replicator.offer(0, 1, 3)
    eventually(lambda: (0, 1, 3) in here.replicated)
    assert [(rank, name) for rank, name, _why in here.lost] == [(0, "b")]
    assert spare.holds(Place.REPLICA) == [(0, 1, 3)]


def test_a_step_counts_as_replicated_when_all_partners_hold_it(
    node: Callable[..., Node], agent: Callable[[str], AgentProcess]
) -> None:
    here, there = node("a"), node("b")
    slow = agent("c")
    segment = here.worker(0)
    here.replicator.set_partners(0, (there.partner, Partner("c", "127.0.0.1", slow.port)))
    write(segment, 1, 1)
    here.replicator.offer(0, 1, 1)
    eventually(lambda: here.replicated == [(0, 1, 1)])
    os.kill(slow.process.pid, signal.SIGSTOP)
    write(segment, 1, 2)
    here.replicator.offer(0, 1, 2)
    eventually(lambda: (0, 1, 2) in there.holds(Place.REPLICA))
    assert here.replicated == [(0, 1, 1)]
    # nobody waits for one that has failed: what the others hold counts, and is told again
    eventually(lambda: [one[:2] for one in here.lost] == [(0, "c")])
    eventually(lambda: here.replicated[1:] == [(0, 1, 2)])
    assert here.others == [True]
    here.replicator.set_partners(0, (there.partner,))
    here.replicator.offer(0, 1, 2)
    eventually(lambda: here.replicated[2:] == [(0, 1, 2)])


def test_a_stopped_partner_neither_blocks_the_offers_nor_goes_unreported(
    node: Callable[..., Node], agent: Callable[[str], AgentProcess]
) -> None:
    here, stopped = node("a"), agent("b")
    segment = here.worker(0, 8_000_000)
    here.replicator.set_partners(0, (Partner("b", "127.0.0.1", stopped.port),))
    os.kill(stopped.process.pid, signal.SIGSTOP)
    write(segment, 1, 1)
    began = time.monotonic()
    here.replicator.offer(0, 1, 1)
    assert time.monotonic() - began < 0.1
    eventually(lambda: here.lost)
    os.kill(stopped.process.pid, signal.SIGCONT)
    eventually(lambda: here.replicated == [(0, 1, 1)])  # tried again, by itself


def test_closing_in_mid_push_ends_every_thread(
    node: Callable[..., Node], agent: Callable[[str], AgentProcess]
) -> None:
    here, stopped = node("a"), agent("b")
    write(here.worker(0, 8_000_000), 1, 1)
    here.replicator.set_partners(0, (Partner("b", "127.0.0.1", stopped.port),))
    here.replicator.offer(0, 1, 1)
    eventually(lambda: here.replicated)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    write(here.worker(0, 8_000_000), 1, 2)
    here.replicator.offer(0, 1, 2)
    began = time.monotonic()
    here.replicator.close(timeout_s=2.0)
    assert time.monotonic() - began < 1.0
    os.kill(stopped.process.pid, signal.SIGCONT)


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
        eventually(lambda step=step: len(here.replicated) == step)
        if step == 200:
            before = [_rss(process) for process in processes]
    grown = [_rss(process) - old for process, old in zip(processes, before, strict=True)]
    assert max(grown) < 512 * 1024, f"grown by {grown} bytes in 1000 commits"


# --- fetching -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", list(Place))
def test_a_commit_is_fetched_into_the_own_segment(node: Callable[..., Node], place: Place) -> None:
    here, there = node("a"), node("b")
    commit = write(there.store.ensure(5, place, layout_of(NBYTES)), 1, 9)
    source = _source(there.server.port, 9, place, commit.digest)
    held = fetch(SECRET, source, 5, here.store, 5.0)
    assert (held.rank, held.step, held.attempt, held.place) == (5, 9, 1, Place.OWN)
    assert here.holds(Place.OWN) == [(5, 1, 9)]
    segment = here.store.find(5, Place.OWN)
    assert segment is not None
    assert segment.layout == layout_of(NBYTES)
    assert bytes(segment.payload(segment.commits()[0])) == content(NBYTES, 1, 9)
    there.close()
    assert fetch(SECRET, source, 5, here.store, 5.0) == held  # it lies here: nobody is asked


def test_a_commit_that_is_not_held_is_said_so(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    write(there.worker(0), 1, 9)
    for source in (
        _source(there.server.port, 8),
        _source(there.server.port, 9, attempt=2),
        _source(there.server.port, 9, Place.REPLICA),
    ):
        with pytest.raises(SourceLost, match="not_held"):
            fetch(SECRET, source, 0, here.store, 5.0)
    assert here.store.held() == []


def test_a_byte_flipped_at_the_source_is_not_taken(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    segment = there.worker(0)
    commit = write(segment, 1, 9)
    segment._slot(commit.slot)[3] ^= 1
    with pytest.raises(BadShard):
        fetch(SECRET, _source(there.server.port, 9), 0, here.store, 5.0)
    with pytest.raises(BadShard, match="wanted"):
        fetch(SECRET, _source(there.server.port, 9, digest="ab" * 16), 0, here.store, 5.0)
    assert here.store.held() == []


@pytest.mark.chaos
def test_a_source_killed_in_mid_fetch_is_lost_and_the_next_one_serves(
    shm: Path, node: Callable[..., Node], agent: Callable[[str], AgentProcess]
) -> None:
    here = node("a")
    nbytes = 64_000_000
    for name in ("b", "c"):
        write(SegmentStore(shm / name, MESH).ensure(0, Place.OWN, layout_of(nbytes)), 1, 9)
    first, second = agent("b"), agent("c")

    def kill_in_the_middle() -> None:
        eventually(lambda: list((shm / "a" / MESH).glob(".own-0.seg.*")))
        first.process.kill()

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    with pytest.raises(SourceLost):
        fetch(SECRET, _source(first.port, 9), 0, here.store, 5.0)
    killer.join()
    assert here.store.held() == []
    fetch(SECRET, _source(second.port, 9), 0, here.store, 5.0)
    assert here.holds(Place.OWN) == [(0, 1, 9)]


def test_a_stopped_source_is_given_up_in_time(
    node: Callable[..., Node], agent: Callable[[str], AgentProcess]
) -> None:
    here, stopped = node("a"), agent("b")
    os.kill(stopped.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(SourceLost):
        fetch(SECRET, _source(stopped.port, 9), 0, here.store, 0.2)
    assert time.monotonic() - began < 1.0


# --- strangers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", list(Role))
def test_a_wrong_secret_is_refused(node: Callable[..., Node], role: Role) -> None:
    there = node("b")
    with pytest.raises(Refused, match="unauthorised"):
        wire.connect(b"a guess", "127.0.0.1", there.server.port, role, QUICK)
    wire.connect(SECRET, "127.0.0.1", there.server.port, role, QUICK).close()


def test_a_server_that_does_not_know_the_secret_gets_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(wire.GREETING + bytes(wire.NONCE_BYTES))
                wire.receive_header(sock)
                wire.send_header(sock, {"proof": "0" * 64})

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(WireError, match="does not know"):
            wire.connect(SECRET, "127.0.0.1", listener.getsockname()[1], Role.PUSH, QUICK)
        thread.join()


def test_an_answer_cannot_be_replayed(node: Callable[..., Node]) -> None:
    there = node("b")
    answers: list[bytes] = []
    for _connection in range(2):
        with socket.create_connection(("127.0.0.1", there.server.port), 2) as sock:
            greeting = bytearray(wire.GREETING_BYTES)
            wire.receive_into(sock, memoryview(greeting))
            answers.append(wire.answer_greeting(SECRET, bytes(greeting), Role.FETCH)[0])
            sock.sendall(answers[0])
            if len(answers) == 2:
                with pytest.raises(Refused):
                    wire.receive_header(sock)
            else:
                assert "proof" in wire.receive_header(sock)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">II", wire.HEADER_LIMIT + 1, 0) + b"x" * 100,
        struct.pack(">II", 5, 0) + b"\xff\xfe\xfd\xfc\xfb",
        struct.pack(">II", 6, zlib.crc32(b"[1, 2]", 6)) + b"[1, 2]",
        b"",
    ],
)
def test_garbage_ends_its_own_connection_only(node: Callable[..., Node], garbage: bytes) -> None:
    here, there = node("a"), node("b")
    with socket.create_connection(("127.0.0.1", there.server.port), 2) as sock:
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1000):
                pass
    commit = write(there.worker(0), 1, 1)
    assert fetch(SECRET, _source(there.server.port, 1), 0, here.store, 5.0).digest == commit.digest


@pytest.mark.parametrize("rank", [-1, "0", None, True, 2**70])
def test_a_malformed_request_is_not_obeyed(node: Callable[..., Node], rank: object) -> None:
    there = node("b")
    with wire.connect(SECRET, "127.0.0.1", there.server.port, Role.PUSH, QUICK) as sock:
        header = {"op": "layout", "rank": rank, "mesh": MESH, "nbytes": 2, "credential": 0}
        wire.send_header(sock, {**header, "digest": payload_digest(b"{}")})
        sock.sendall(b"{}")
        with pytest.raises((WireError, OSError)):
            wire.receive_header(sock)
    assert there.store.held() == []
