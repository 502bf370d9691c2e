"""The store gets each event of a job once, in order, however many supervisors the job has had."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast_service.job_model.events.attempts import StandbyEvent
from holdfast_service.job_model.supervisor_protocol import first_event, is_next_event
from holdfast_service.supervisor.event_log import EventLog
from holdfast_workers.agent.run_journal import EventBackup

AGENTS = 3


class History:
    """A job's supervisors in turn, its agents, and its reconciler."""

    def __init__(self) -> None:
        self.epoch = 0
        self.appended: list[str] = []
        self.backups = [EventBackup() for _ in range(AGENTS)]
        self.stored: list[tuple[int, str]] = []
        self.late: set[str] = set()
        """Events found only after later ones of a successor, which reached no agent that had them,
        were stored."""
        self.start(frozenset(range(AGENTS)))

    def start(self, reachable: frozenset[int]) -> None:
        """A new supervisor, which finds the agents `reachable`."""
        self.epoch += 1
        self.log = EventLog(0)
        kept = {event.seq: event for agent in reachable for event in self.backups[agent].all()}
        self.log.adopt([kept[seq] for seq in sorted(kept)], self.epoch)
        newest = self.stored[-1][0] if self.stored else 0
        before = {event.data["agent"] for seq, event in kept.items() if seq < newest}
        self.late |= before - {agent for _, agent in self.stored}

    def append(self) -> None:
        self.appended.append(str(len(self.appended)))
        self.log.append(StandbyEvent(agent=self.appended[-1], state="ready"))

    def back_up(self, agent: int) -> None:
        events = self.log.not_backed_up_by(f"n{agent}", "a")
        self.backups[agent].keep(events)
        self.backups[agent].forget(self.log.acked)
        self.log.mark_backed_up(f"n{agent}", "a", events)

    def read(self, *, is_lost: bool) -> None:
        """The reconciler asks for what it has not stored; `is_lost`: it does not get the answer."""
        answer = self.log.after(self.stored[-1][0] if self.stored else 0)
        if not is_lost:
            self.stored += [(event.seq, event.data["agent"]) for event in answer]


ACTIONS = st.one_of(
    st.just(("append",)),
    st.tuples(st.just("back up"), st.integers(0, AGENTS - 1)),
    st.tuples(st.just("read"), st.booleans()),
    st.tuples(st.just("start"), st.frozensets(st.integers(0, AGENTS - 1))),
)


@settings(max_examples=400)
@given(st.lists(ACTIONS, max_size=40))
@example(  # stored events that no agent has, and later ones that an agent got before the first read
    [
        *[("append",), ("append",), ("read", False), ("start", frozenset({0}))],
        *[("append",), ("back up", 0), ("start", frozenset({0})), ("read", False)],
    ]
)
@example(  # the same, and the first read comes before the next supervisor
    [
        *[("append",), ("append",), ("read", False), ("start", frozenset({0})), ("append",)],
        *[("back up", 0), ("read", False), ("append",), ("back up", 0), ("start", frozenset({0}))],
        ("read", False),
    ]
)
@example(  # an event whose only copy the next supervisor did not reach
    [
        *[("append",), ("back up", 0), ("start", frozenset()), ("append",), ("read", False)],
        ("start", frozenset({0})),
    ]
)
def test_each_event_is_stored_once_and_in_order(actions: list[tuple[object, ...]]) -> None:
    history = History()
    for action, *arguments in actions:
        match action, arguments:
            case "append", []:
                history.append()
            case "back up", [int(agent)]:
                history.back_up(agent)
            case "read", [bool(is_lost)]:
                history.read(is_lost=is_lost)
            case "start", [frozenset() as reachable]:
                history.start(reachable)
    history.read(is_lost=False)
    stored = [agent for _, agent in history.stored]
    assert len(set(stored)) == len(stored)
    assert sorted(stored, key=int) == stored
    in_log = [event.data["agent"] for event in history.log.after(0)]
    assert set(in_log) - history.late <= set(stored), "one is not stored"
    assert len(set(in_log)) == len(in_log)


def test_an_event_after_a_gap_is_not_the_next() -> None:
    first = first_event(3)
    assert is_next_event(first + 1, first)
    assert not is_next_event(first + 2, first)
    assert is_next_event(first_event(4), first)  # what another supervisor has not told is unknown
    assert not is_next_event(first_event(4) + 1, first)
    assert not is_next_event(first, first_event(4))
    assert first_event(1, after=57) == first_event(1)
    assert first_event(1, after=first_event(2)) == first_event(3)
