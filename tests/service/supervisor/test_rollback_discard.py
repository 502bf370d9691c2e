"""Steps that a rollback discarded disappear from all records, also after a supervisor restart."""

from __future__ import annotations

from dataclasses import replace

from holdfast_service.job_model.events.codec import numbered
from holdfast_service.job_model.events.health import GuardTrippedEvent
from holdfast_service.job_model.supervisor_protocol import Cursors
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.supervisor.run_buffer import RunBuffer
from holdfast_workers.agent.run_journal import RunJournal
from holdfast_workers.protocol.findings import GuardAction, GuardKind, TripReport
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.training.skipped_windows import Ledger


def row(attempt: int, step: int) -> StepRow:
    return StepRow(attempt, step, 0.0, 2.0, 1.0, 1e-3, 8, 0.1, "")


def test_a_restarted_supervisor_recovers_the_ledger_and_the_rollback() -> None:
    skip = TripReport(GuardKind.LOSS_SPIKE, 10, 9, GuardAction.SKIP, "9.5 is above 4")
    rollback = replace(skip, step=23, decision=GuardAction.ROLLBACK, back_to=18)
    facts = Facts.from_events(
        numbered(seq, 0.0, GuardTrippedEvent(attempt=1, trip=trip, ledger=ledger))
        for seq, trip, ledger in ((1, skip, ((9, 10),)), (2, rollback, ((9, 10), (20, 23))))
    )
    assert facts.ledger == Ledger(((9, 10), (20, 23)))
    assert facts.line.contains(1, 18)
    assert not facts.line.contains(1, 19)
    assert facts.line.contains(2, 19)


def test_discarded_digests_are_not_reported_even_if_an_agent_still_sends_them() -> None:
    record = RunBuffer()
    old = {step: f"old{step}" for step in range(1, 10)}
    record.add("n0", "i", [row(1, step) for step in range(1, 10)], old, [], {})
    record.add("n1", "i", [row(1, step) for step in range(1, 10)], old, [], {})
    trip = TripReport(GuardKind.LOSS_SPIKE, 9, 9, GuardAction.ROLLBACK, "9 is above 4", back_to=6)
    record.apply(GuardTrippedEvent(attempt=1, trip=trip, ledger=()))
    record.add("n1", "i", [], {8: "old8", 9: "old9"}, [], {})  # it has no row of a later attempt
    assert sorted(record.after(Cursors())[1]) == [1, 2, 3, 4, 5, 6]
    new = {step: f"new{step}" for step in (7, 8)}
    record.add("n0", "i", [row(2, 7), row(2, 8)], new, [], {})
    record.add("n1", "i", [], {8: "old8", 9: "old9"}, [], {})
    reported = record.after(Cursors())[1]
    assert (reported[6], reported[7], reported[8]) == ("old6", "new7", "new8")
    assert 9 not in reported


def test_a_journal_drops_digests_of_steps_that_the_next_attempt_repeats() -> None:
    journal = RunJournal("n0", "i")
    for step in range(1, 6):
        journal.add_row(row(1, step))
        journal.add_digest(step, f"old{step}", 1)
    journal.add_row(row(2, 4))
    assert journal.after((0, 0))[1] == {1: (1, "old1"), 2: (1, "old2"), 3: (1, "old3")}
    journal.add_digest(4, "new4", 2)
    assert journal.after((1, 5))[1] == {3: (1, "old3"), 4: (2, "new4")}
