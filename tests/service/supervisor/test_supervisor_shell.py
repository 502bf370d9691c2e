"""The supervisor's shell: its buffers, its tracking of agents, and its restart."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from tests.support.faults.faulty_storage import Bucket, MemoryStorage
from tests.support.nodes.supervised import small_training, supervised
from tests.support.simulation.core_config import core_config
from tests.support.waiting import eventually

from holdfast_service.job_model.events.attempts import StandbyEvent
from holdfast_service.job_model.events.codec import FORMAT_VERSION, read_event
from holdfast_service.job_model.events.progress import AwayWhy, JobAwayEvent
from holdfast_service.job_model.supervisor_protocol import Cursors, EventKind, Phase
from holdfast_service.job_model.world_history import LEAST_ABSENCE_S
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.supervisor.agent_watch import AgentWatch
from holdfast_service.supervisor.event_log import EventLog
from holdfast_service.supervisor.run_buffer import DIGEST_OVERLAP, MAX_LINES, RunBuffer
from holdfast_service.supervisor.supervisor import Supervisor
from holdfast_service.supervisor.supervisor_times import SupervisorTimes
from holdfast_workers.agent.run_journal import KEPT_EVENTS
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.lifeline import SILENCE
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.protocol.answers import AgentFailure, AgentReport, PollAnswer, WorkerReport
from holdfast_workers.protocol.codec import UnreadableDocument
from holdfast_workers.protocol.commands import CommandKind, Poll, Request
from holdfast_workers.protocol.findings import SOFTWARE, HealthFinding, HealthReport, Level
from holdfast_workers.protocol.messages import LogLine, StepRow, SupervisorEvent, WorkerState
from holdfast_workers.protocol.process_identity import ProcessIdentity

SECRET = b"s" * 32
WAIT_S = 60.0
Expected = TypeVar("Expected")


# --- buffers --------------------------------------------------------------------------------------


def test_stored_events_are_kept_only_as_far_back_as_agents_keep_them() -> None:
    log = EventLog()
    total = KEPT_EVENTS + 500
    for number in range(total):
        log.append(StandbyEvent(agent=f"n{number}", state="ready"))
    assert len(log.after(0)) == total  # no event is stored yet
    last = log.after(0)[-1].seq
    assert log.after(last) == ()
    kept = list(range(last - KEPT_EVENTS + 1, last + 1))
    assert [event.seq for event in log.after(0)] == kept
    assert [event.seq for event in log.not_backed_up_by("n0", "a")] == kept


def test_the_journal_at_the_agents_names_its_format() -> None:
    log = EventLog()
    log.append(StandbyEvent(agent="n1", state="ready"))
    (copy,) = log.not_backed_up_by("n0", "a")
    assert copy.format == FORMAT_VERSION == 1
    successor = EventLog()
    newer_data = {**copy.data, "of_a_newer_version": 1}
    successor.adopt([replace(copy, seq=7, data=newer_data)], 2)
    assert [(event.seq, read_event(event)) for event in successor.after(0)] == [
        (7, StandbyEvent(agent="n1", state="ready"))
    ]
    older = SupervisorEvent(copy.seq, copy.at, copy.kind, copy.data)
    renamed = replace(copy, seq=copy.seq + 1, kind="rank.renamed")
    successor.adopt([older, renamed], 2)
    assert [event.kind for event in successor.after(0)] == ["standby", "rank.renamed"]
    with pytest.raises(UnreadableDocument, match=r"event \d+ has format 2.* up to format 1"):
        read_event(replace(copy, format=2))


def row(attempt: int, step: int) -> StepRow:
    return StepRow(attempt, step, 0.0, 1.0, 1.0, 1.0, 1, 1.0, "")


def line(seq: int) -> LogLine:
    return LogLine("n0", "a", seq, 0.0, "w", 1, 0, "output", "text")


def test_stored_rows_digests_and_lines_are_dropped() -> None:
    record = RunBuffer()
    steps = range(1, 1001)
    record.add(
        "n0", "a", [row(1, s) for s in steps], dict.fromkeys(steps, "d"), [line(1), line(2)], {}
    )
    record.after(Cursors(row=(1, 1000), logs={"n0.a": 1}))
    rows, digests, lines = record.after(Cursors(row=(1, 1000), logs={"n0.a": 1}))
    assert (rows, [log_line.seq for log_line in lines]) == ((), [2])
    assert min(digests) == 1000 - DIGEST_OVERLAP
    assert record.after(Cursors(row=(1, 1000), logs={"n0.a": 2}))[2] == ()
    assert not record._lines and len(record._digests) <= DIGEST_OVERLAP + 1


def test_lines_are_fetched_only_as_far_as_there_is_room_for_them() -> None:
    record = RunBuffer()
    lines = [line(seq) for seq in range(1, MAX_LINES + 1)]
    record.add("n0", "a", [], {}, lines[:-5], {}, 5)
    assert record.request("n0", "a", 7) == Poll((0, 0), MAX_LINES - 5, 0, 5, 7)
    record.add("n0", "a", [], {}, lines[-5:], {}, 1)
    assert record.request("n0", "a", 7).most_lines == 0
    assert record.request("n1", "b", 7).most_lines == MAX_LINES
    stored = record.after(Cursors())[2][-1].seq
    record.after(Cursors(logs={"n0.a": stored}))
    assert record.request("n0", "a", 8) == Poll((0, 0), MAX_LINES, stored, stored, 8)


def test_lines_that_are_never_fetched_are_marked_in_their_place() -> None:
    record = RunBuffer()
    record.add("n0", "a", [], {}, [line(1), line(2)], {}, 1_234)
    record.add("n1", "b", [], {}, [], {}, 0)
    record.mark_unfetched()
    record.mark_unfetched()
    _, _, lines = record.after(Cursors())
    assert [entry.seq for entry in lines] == [1, 2, 3]
    assert lines[-1].text.startswith("WARNING ... 1,234 lines left out: the job ended")
    assert lines[-1].rank == 0


def test_the_place_where_an_agent_was_lost_is_marked() -> None:
    record = RunBuffer()
    record.add("n0", "a", [], {}, [line(1)], {}, 0)
    for _ in range(2):
        record.mark_lost("n0", "a")
        record.mark_lost("n9", "z")
    texts = [entry.text for entry in record.after(Cursors())[2]]
    assert len(texts) == 2
    assert "lines may be missing here" in texts[-1]


def test_digests_of_repeated_steps_are_reported_again() -> None:
    record = RunBuffer()
    record.add("n0", "a", [row(1, 500)], {500: "d"}, [], {})
    record.after(Cursors(row=(1, 500)))
    record.add("n0", "a", [row(2, 3)], {2: "x", 3: "y"}, [], {})
    assert record.after(Cursors(row=(1, 500)))[1].items() >= {2: "x", 3: "y"}.items()


# --- tracking of agents ---------------------------------------------------------------------------


class FakeAgents:
    """One agent that answers `hello`; `answers()` is the cluster's answer about its node."""

    def __init__(self, answers: Any) -> None:
        self.seats = ["n0"]
        self.answers = answers
        self.life: AgentReport | None = None
        self.calls: list[CommandKind] = []
        self.failing: set[CommandKind] = set()
        self.ended = False
        """Whether the cluster knows that the agent's process has ended."""

    def ensure(self) -> bool:
        return True

    def restart(self, seat: str, process: ProcessIdentity) -> None: ...
    def keep_seats(self, seats: frozenset[str] | None) -> None: ...

    def has_ended(self, seat: str, process: ProcessIdentity) -> bool:
        return self.ended

    def node_answers(self, node_id: str) -> bool:
        answer: bool = self.answers()
        return answer

    def draining(self) -> dict[str, float | None]:
        return {}

    def call(
        self, seat: str, request: Request, answer: type[Expected], *, timeout_s: float
    ) -> Future[Expected]:
        future: Future[Expected] = Future()
        self.calls.append(request.command.kind)
        if request.command.kind in self.failing:
            future.set_exception(TimeoutError("too slow"))
        elif not isinstance(self.life, answer):
            future.set_exception(ConnectionError("no agent there"))
        else:
            future.set_result(self.life)
        return future


def report(incarnation: str, port: int) -> AgentReport:
    return AgentReport("n0", incarnation, "node", "127.0.0.1", 1, port, 0, 2, 0, 0, True)


def watching(
    agents: FakeAgents,
    lapse_s: float | None = None,
    heartbeat_timeout_s: float = 5.0,
    starting_for_s: float = 15.0,
) -> tuple[AgentWatch, queue.Queue[inputs.Input]]:
    received: queue.Queue[inputs.Input] = queue.Queue()
    times = SupervisorTimes(
        heartbeat_timeout_s=heartbeat_timeout_s,
        hello_s=1.0,
        probe_s=0.2,
        check_s=1.0,
        starting_for_s=starting_for_s,
    )
    return AgentWatch(agents, SECRET, received.put, times, lapse_s=lapse_s), received


def test_an_incarnation_that_comes_back_is_checked_before_it_is_reported(shm: Path) -> None:
    server = DataServer(
        SegmentStore(shm, "dp_shard=1", on_quarantine=lambda _: None), SECRET, "127.0.0.1"
    )
    agents = FakeAgents(lambda: True)
    agents.life = report("a", server.port)
    watch, received = watching(agents)
    watch.refresh(1)
    assert received.get(timeout=WAIT_S) == inputs.AgentUp(agents.life)
    watch.forget("n0")
    agents.calls.clear()
    agents.failing.add(CommandKind.CHECK_NODE)
    for _ in range(2):
        watch.refresh(1)
    assert watch.reports == [] and agents.calls == [CommandKind.HELLO, CommandKind.CHECK_NODE] * 2
    agents.failing.clear()
    watch.refresh(1)
    assert watch.reports == [], "what the check has found is in the next answer"
    watch.refresh(1)
    assert watch.reports == [agents.life]
    agents.life = report("b", server.port)  # a new life has checked its node itself
    watch.forget("n0")
    agents.calls.clear()
    watch.refresh(1)
    assert agents.calls == [CommandKind.HELLO]
    watch.close()
    server.close()


def test_an_agent_that_answered_a_fence_without_a_store_is_asked_until_it_is_ready(
    shm: Path,
) -> None:
    server = DataServer(
        SegmentStore(shm, "dp_shard=1", on_quarantine=lambda _: None), SECRET, "127.0.0.1"
    )
    agents = FakeAgents(lambda: True)
    agents.life = report("a", server.port)
    watch, received = watching(agents)
    watch.refresh(1)
    assert received.get(timeout=WAIT_S) == inputs.AgentUp(agents.life)
    watch.update(replace(agents.life, ready=False))
    watch.refresh(1)
    assert received.get(timeout=WAIT_S) == inputs.AgentUp(agents.life)
    watch.close()
    server.close()


def test_only_an_agent_that_still_starts_is_asked_between_the_looks_at_all(shm: Path) -> None:
    server = DataServer(
        SegmentStore(shm, "dp_shard=1", on_quarantine=lambda _: None), SECRET, "127.0.0.1"
    )
    agents = FakeAgents(lambda: True)
    watch, received = watching(agents)
    watch.ask_starting(1)
    assert agents.calls == [], "an agent that never answered may not be there"
    unusable = AgentFailure("no room in its memory", "OSError", "")
    for failure, asked in ((unusable, False), (None, True)):
        agents.life = replace(report("a", server.port), ready=False, failure=failure)
        watch.refresh(1)
        assert watch.some_start is asked
        agents.calls.clear()
        watch.ask_starting(1)
        assert agents.calls == [CommandKind.HELLO] * asked
    agents.life = report("a", server.port)
    watch.ask_starting(1)
    assert received.get(timeout=WAIT_S) and not watch.some_start
    agents.calls.clear()
    watch.ask_starting(1)
    assert agents.calls == []
    watch.close()
    server.close()


def test_an_agent_that_takes_long_or_lacks_software_is_asked_less_often(shm: Path) -> None:
    server = DataServer(
        SegmentStore(shm, "dp_shard=1", on_quarantine=lambda _: None), SECRET, "127.0.0.1"
    )
    lacking = HealthFinding(SOFTWARE, "packages", Level.UNFIT, "no structlog", lost=True)
    starting = replace(report("a", server.port), ready=False)
    refused = replace(starting, health=HealthReport(1, (lacking,)))
    for life, for_s, asked in (
        (starting, 60.0, True),
        (starting, 0.0, False),
        (refused, 60.0, False),
    ):
        agents = FakeAgents(lambda: True)
        agents.life = life
        watch, _ = watching(agents, starting_for_s=for_s)
        watch.refresh(1)
        assert watch.some_start is asked
        agents.calls.clear()
        watch.ask_starting(1)
        assert agents.calls == [CommandKind.HELLO] * asked
        agents.calls.clear()
        watch.refresh(1)
        assert agents.calls == [CommandKind.HELLO], "it may become ready at any time"
        watch.close()
    server.close()


def hang() -> bool:
    time.sleep(2)
    return True


def fail() -> bool:
    raise RuntimeError("the cluster's head is gone")


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("answers", "node_lost"),
    [(lambda: False, True), (lambda: True, False), (hang, False), (fail, False)],
)
def test_an_agent_that_dies_after_its_hello_is_reported_lost(answers: Any, node_lost: bool) -> None:
    """At once, by the cluster's word, independent of the later probe of its node."""
    agents = FakeAgents(answers)
    agents.life = report("a", 1)  # no process listens on this port
    agents.ended = True
    watch, received = watching(agents)
    watch.refresh(1)
    up, lost = received.get(timeout=WAIT_S), received.get(timeout=WAIT_S)
    assert isinstance(up, inputs.AgentUp) and isinstance(lost, inputs.AgentLost)
    assert (lost.incarnation, lost.certain) == ("a", True)
    assert watch.reports == []
    status = received.get(timeout=WAIT_S)
    assert isinstance(status, inputs.NodeStatus) and status.lost is node_lost
    watch.close()


def test_the_node_of_a_forgotten_agent_is_probed_too(tmp_path: Path) -> None:
    """A command that failed may be the first sign of a lost node, before its lifeline ends."""
    agents = FakeAgents(lambda: False)
    server = DataServer(SegmentStore(tmp_path, "tp=1"), SECRET, "127.0.0.1")
    agents.life = report("a", server.port)
    watch, received = watching(agents)
    watch.refresh(1)
    assert isinstance(received.get(timeout=WAIT_S), inputs.AgentUp)
    watch.forget("n0")
    status = received.get(timeout=WAIT_S)
    assert isinstance(status, inputs.NodeStatus) and status.lost
    server.close()
    watch.close()


def test_the_end_of_an_old_incarnation_is_not_attributed_to_the_present_one(tmp_path: Path) -> None:
    agents = FakeAgents(lambda: True)
    lives = [DataServer(SegmentStore(tmp_path, "tp=1"), SECRET, "127.0.0.1") for _ in range(2)]
    agents.life = report("a", lives[0].port)
    watch, received = watching(agents)
    watch.refresh(1)
    agents.life = report("b", lives[1].port)
    watch._send_hello("n0", 1)
    lives[0].close()
    received.get(timeout=WAIT_S)
    received.get(timeout=WAIT_S)
    watch._on_process_end("n0 a", "late")
    ended = inputs.LeaseEnded("n0", "a", certain=True)
    assert received.get(timeout=WAIT_S) == ended and [report.agent for report in watch.reports] == [
        "n0"
    ]
    agents.ended, agents.life = True, None
    lives[1].close()
    lost = received.get(timeout=WAIT_S)
    while lost == ended:  # its lifeline may have reported it too
        lost = received.get(timeout=WAIT_S)
    assert isinstance(lost, inputs.AgentLost) and lost.incarnation == "b"
    watch.close()


def test_possible_leases_of_a_former_supervisor_end_one_lapse_after_the_first_refresh() -> None:
    watch, received = watching(FakeAgents(lambda: True), lapse_s=0.2)
    began = time.monotonic()

    def has_ended() -> bool:
        watch.refresh(1)
        return not received.empty()

    eventually(has_ended)
    assert time.monotonic() - began >= 0.2, "a former supervisor may grant a lease until now"
    watch.refresh(1)
    assert received.get(timeout=WAIT_S) == inputs.LeaseEnded("n0", "") and received.empty()
    watch.close()


def test_a_silent_agent_has_no_lease_and_a_forgotten_agent_has_a_short_one(
    tmp_path: Path,
) -> None:
    agents = FakeAgents(lambda: True)
    server = DataServer(SegmentStore(tmp_path, "tp=1"), SECRET, "127.0.0.1", heartbeat_s=0.05)
    watch, received = watching(agents, lapse_s=3600.0, heartbeat_timeout_s=0.5)
    agents.life = report("a", server.port)
    watch.refresh(1)
    assert isinstance(received.get(timeout=WAIT_S), inputs.AgentUp)
    watch._on_silence("n0 a", f"{SILENCE} for 0.5 s")
    agents.life = None
    lost = received.get(timeout=WAIT_S)
    assert isinstance(lost, inputs.AgentLost) and not lost.certain
    assert received.get(timeout=WAIT_S) == inputs.LeaseEnded("n0", "a")
    assert isinstance(received.get(timeout=WAIT_S), inputs.NodeStatus)

    agents.life = report("b", server.port)
    watch.refresh(1)
    assert isinstance(received.get(timeout=WAIT_S), inputs.AgentUp)
    agents.life = None
    forgotten_at = time.monotonic()
    watch.forget("n0")
    assert isinstance(received.get(timeout=WAIT_S), inputs.NodeStatus)
    while received.empty():
        watch.refresh(1)
        time.sleep(0.02)
    assert received.get(timeout=WAIT_S) == inputs.LeaseEnded("n0", "b")
    assert time.monotonic() - forgotten_at >= 0.5
    watch.close()
    server.close()


@pytest.mark.cell("P1", "supervisor")
@pytest.mark.chaos
def test_a_supervisor_that_finds_a_successor_halts(tmp_path: Path) -> None:
    with supervised(tmp_path, small_training(60), standbys=0) as run:
        run.wait_step(5)
        first = run.supervisor
        run.supervisor = (
            run._supervise()
        )  # the first supervisor still runs and does not know of the second
        run.wait(lambda: first._halted)
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert {row.attempt for row in run.all_rows} == {1}


# --- restart --------------------------------------------------------------------------------------


def test_the_fence_is_read_while_agents_are_looked_for() -> None:
    """A supervisor that adopts a job does not wait for the fence once the agents have answered; it
    claims its epoch before it commands them only if the fence has answered meanwhile."""
    listed = threading.Event()

    class ListedStorage(MemoryStorage):
        def objects(self) -> dict[str, int]:
            listed.set()
            return super().objects()

    class SlowAgents(FakeAgents):
        began_in_time = False

        def ensure(self) -> bool:
            self.began_in_time = listed.wait(WAIT_S)
            return True

    agents = SlowAgents(lambda: True)
    supervisor = Supervisor(
        core_config((WorldShape.of({"dp_shard": 2}, 1),)),
        agents,
        SECRET,
        MemoryStorage(Bucket()),
        ListedStorage(Bucket()),
        is_latest=lambda: True,
    )
    supervisor.halt()  # after its start
    supervisor.run()
    assert agents.began_in_time


def supervisor_of(
    agents: Any, config: RecoveryConfig | None = None, times: SupervisorTimes | None = None
) -> Supervisor:
    """A supervisor of two ranks on two nodes, with storages in memory."""
    return Supervisor(
        config or core_config((WorldShape.of({"dp_shard": 2}, 1),)),
        agents,
        SECRET,
        MemoryStorage(Bucket()),
        MemoryStorage(Bucket()),
        is_latest=lambda: True,
        times=times,
    )


def test_a_supervisor_that_stood_still_reports_the_absence() -> None:
    supervisor = supervisor_of(FakeAgents(lambda: True))
    for now in (1e9, 1e9 + 1, 1e9 + LEAST_ABSENCE_S, 1e9 + 2 * LEAST_ABSENCE_S + 900):
        supervisor._report_absence(now)
    reported = [read_event(event) for event in supervisor.report(Cursors()).events]
    assert reported == [JobAwayEvent(away_s=LEAST_ABSENCE_S + 900, why=AwayWhy.STOPPED)]


def test_the_wait_for_the_last_output_is_no_absence() -> None:
    supervisor = supervisor_of(FakeAgents(lambda: True))
    core = SimpleNamespace(next_deadline=lambda: None, phase=Phase.ENDED, attempt=1)
    supervisor._core = core  # type: ignore[assignment]

    def end(_: inputs.Input) -> None:
        supervisor._looked_at = time.time() - LEAST_ABSENCE_S - 1
        supervisor._ended = True

    supervisor._feed = end  # type: ignore[method-assign, assignment]
    supervisor._inputs.put(inputs.NoPlace())
    supervisor._run_once()
    assert supervisor._events.after(0) == ()


def test_a_supervisor_that_was_started_again_uses_no_number_of_a_stored_incident() -> None:
    """Its plan is that of the job's first start, and no agent may be left that kept its events."""
    config = core_config((WorldShape.of({"dp_shard": 2}, 1),))
    supervisor = supervisor_of(FakeAgents(lambda: True), config)
    supervisor._core = core = RecoveryCore(config, time.time())
    supervisor.report(Cursors(incident=3))
    supervisor._feed(inputs.Tick())
    fault = Fault(Cause.NODE_LOST, 1, time.time(), "n0 is lost")
    assert core.state.incidents.new_incident(fault, time.time(), 0).number == 4


@pytest.mark.parametrize("state", [WorkerState.TRAINING, WorkerState.PARKED])
def test_the_end_waits_shortly_for_the_lines_of_ranks_that_still_run(
    state: WorkerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are stopped only then. The lines of ranks that have ended are finite."""
    clock = count()
    ticks = SimpleNamespace(time=time.time, monotonic=lambda: next(clock), sleep=lambda _: None)
    monkeypatch.setattr("holdfast_service.supervisor.supervisor.time", ticks)
    left = iter(range(1000, -1, -1))
    agents = FakeAgents(lambda: True)
    worker = WorkerReport("n0.a.1", 1, state, 1, 1)
    answers = (PollAnswer((), {}, (), (worker,), (), lines_left=n) for n in left)

    def call(*_: Any, **__: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(next(answers))
        return answer

    agents.call = call  # type: ignore[method-assign]
    times = SupervisorTimes(final_collect_s=20.0, final_s=5000.0)
    supervisor = supervisor_of(agents, times=times)
    supervisor._collect_final_output([report("a", 1)])
    unfetched = next(left, 0)
    assert (unfetched > 0) is (state is WorkerState.TRAINING)


class PolledAgents(FakeAgents):
    """Its first poll is answered late, with the row of that time."""

    def __init__(self) -> None:
        super().__init__(lambda: True)
        self.polls: list[Future[Any]] = []

    def call(
        self, seat: str, request: Request, answer: type[Expected], *, timeout_s: float
    ) -> Future[Expected]:
        future: Future[Any] = Future()
        self.polls.append(future)
        if len(self.polls) > 1:
            future.set_result(polled(2))
        return future


def polled(step: int) -> PollAnswer:
    return PollAnswer((row(1, step),), {}, (), (), ())


@pytest.mark.parametrize("at_the_end", [True, False])
def test_the_last_rows_are_collected_although_an_earlier_poll_is_under_way(
    at_the_end: bool,
) -> None:
    """At the end of the job, and for a server that is about to end."""
    agents = PolledAgents()
    supervisor = supervisor_of(
        agents, times=SupervisorTimes(final_collect_s=WAIT_S, fresh_collect_s=WAIT_S)
    )
    supervisor._watch = SimpleNamespace(reports=[report("a", 1)])  # type: ignore[assignment]
    supervisor._collect(report("a", 1))
    timer = threading.Timer(0.15, lambda: agents.polls[0].set_result(polled(1)))
    timer.start()
    if at_the_end:
        supervisor._collect_final_output([report("a", 1)])
    found = supervisor.report(Cursors(fresh=not at_the_end))
    assert [row.step for row in found.rows] == [1, 2]
    timer.join()


@pytest.mark.parametrize("last_attempt", [0, 3])
def test_a_job_without_a_place_goes_back_to_the_queue_at_once(last_attempt: int) -> None:
    """Also if it is not to be queued again for want of nodes: it has not begun."""

    class Placeless(FakeAgents):
        def ensure(self) -> bool:
            return False

    supervisor = supervisor_of(
        Placeless(lambda: False),
        core_config((WorldShape.of({"dp_shard": 2}, 1),), last_attempt=last_attempt),
    )
    supervisor.run()
    report = supervisor.report(Cursors())
    (end,) = [event.data for event in report.events if event.kind == EventKind.ENDED]
    assert (end["outcome"], end["code"]) == ("PAUSED", "no_nodes")
    assert "those with room are reserved for others" in end["message"]


@pytest.mark.cell("P7", "supervisor")
@pytest.mark.chaos
def test_an_unstored_end_survives_its_supervisor(tmp_path: Path) -> None:
    with supervised(tmp_path, small_training(4), standbys=0) as run:
        is_over = lambda: run.supervisor.report(Cursors()).phase is Phase.ENDED  # noqa: E731
        eventually(is_over, failure_message=run.story)
        epoch = run.fence_floor().epoch
        run.lose_supervisor()
        assert run.wait_end()["outcome"] == "SUCCEEDED"
        assert set(run.rows) == {1, 2, 3, 4} and set(run.digests) >= {1, 2, 3, 4}
        assert any("step 4" in line for line in run.logs), run.logs
        run.wait(lambda: run.supervisor.report(run.cursors).phase is Phase.ENDED)
        assert run.has_all_events()
        assert run.fence_floor().epoch == epoch + 1
