"""No sentence about an incident claims a fact that its record does not have, at any level."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.service.readers.test_verdict import RUNNING
from tests.service.views.test_sentences import assert_readable, data_of, view_of

from holdfast.cli.incidents import COLUMNS, _row
from holdfast.cli.printing.describe import incident_lines
from holdfast_service.job_model.events.incidents import (
    IncidentClosedEvent,
    IncidentEvent,
    IncidentOpenedEvent,
    IncidentRecord,
    IncidentUpdatedEvent,
)
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.program_levels import ProgramLevel
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.decision_ladder import (
    Action,
    Budget,
    SeatingResult,
    Situation,
    applied_decision,
    decide,
)
from holdfast_service.policy.incidents import Incident
from holdfast_service.readers.verdict import verdict
from holdfast_service.views import webhook_messages
from holdfast_service.views.event_text import event_text
from holdfast_service.views.incident_facts import RESTORE_SENTENCES, Fact, facts_of
from holdfast_service.views.incident_text import incident_text
from holdfast_service.views.incidents import IncidentView
from holdfast_service.views.webhook_messages import message
from holdfast_service.wording import device_time

KNOWN_STEP = re.compile(r"(?:continued|went on) from step (-?\d+)")
COST = re.compile(r"cost ([\d.,]+ device-\w+)")
LOST = re.compile(r"(\d+) steps? (?:(?:was|were) )?lost")


@dataclass(frozen=True)
class Claim:
    """Words that claim something, and whether the record has it."""

    words: str
    is_true: Callable[[IncidentRecord | IncidentView, re.Match[str]], bool]


CLAIMS = (
    Claim(KNOWN_STEP.pattern, lambda known, said: known.restored_step == int(said[1])),
    Claim(r"Training (?:continued|began)", lambda known, _: known.closed_at is not None),
    Claim(r"Training (?:continued|began)|state came", lambda known, _: not known.end_code),
    Claim(r"began again", lambda known, _: known.restored_step in (-1, 0)),
    Claim(LOST.pattern, lambda known, said: known.steps_lost == int(said[1])),
    Claim(r"(?i)\bno steps? (?:was )?lost|no step and", lambda known, _: known.steps_lost == 0),
    Claim(r"state came from|initial state|offered", lambda known, _: bool(known.tiers)),
    Claim(r"state came from|initial state", lambda known, _: known.level == 3),
    Claim(r"was resolved|is resolved", lambda known, _: not known.end_code),
    Claim(r"is closed|was closed", lambda known, _: known.closed_at is not None),
    Claim(r"still open", lambda known, _: known.closed_at is None),
    Claim(r"ended the job|not resolved", lambda known, _: bool(known.end_code)),
    Claim(
        r"keeps? (?:its|their)|every process is alive|same processes|resharded",
        lambda known, _: known.level == ProgramLevel.CONTEXT,
    ),
    Claim(r"Training continued|Training began", lambda known, _: known.level == 3),
    Claim(r"not known at this level", lambda known, _: known.restored_step is None),
    Claim(r"for the restore", lambda known, _: (known.phases_s.get("restore") or 0.0) > 0.0),
    Claim(r"for the first step", lambda known, _: known.level == ProgramLevel.CONTEXT),
    Claim(r"start of the program", lambda known, _: known.level < ProgramLevel.CONTEXT),
    Claim(r"\b0 ms for", lambda known, _: False),
)
NAMED = st.sampled_from([(), (1,), (0, 3)])


@st.composite
def incidents(draw: Any) -> Incident:
    """Any incident that the core may record, of a job at any level."""
    level = draw(st.sampled_from(list(ProgramLevel)))
    cause = draw(st.sampled_from(list(Cause)))
    is_program = level < ProgramLevel.CONTEXT
    fault = Fault(cause, 2, 1000.0, "a fault was seen", rank=1, worker="n0.1", agent="n0")
    incident = Incident.opened(1, fault, 1000.5, level)
    if draw(st.booleans()):
        return incident
    situation = Situation(cause, what=fault.what, room=draw(st.booleans()), is_program=is_program)
    decision = decide(situation)
    incident = incident.with_decision(decision, Budget())
    if decision.action not in (Action.STOP, Action.IGNORE):
        seating = SeatingResult(
            moved=draw(NAMED),
            forked=draw(NAMED),
            replaced=draw(NAMED),
            onto=("n2",),
            why_moved="the agent of rank 1 is gone",
            resized=draw(st.sampled_from(["", "2 ranks in place of 4"])),
            is_program=is_program,
        )
        applied = applied_decision(decision, seating)
        incident = replace(
            incident, decision=applied.action.value, reason=applied.reason, next_attempt=3
        )
        step = draw(st.integers(-1, 60) if is_program else st.integers(0, 60))
        lost = draw(st.integers(0, 9))
        if not is_program:
            tiers = {0: "own_ram", 1: draw(st.sampled_from(["init", "remote"]))}
            incident = replace(incident, restored_step=step, steps_lost=lost, tiers=tiers)
        elif draw(st.booleans()):  # it has reported a step since, and perhaps one before
            known = lost if draw(st.booleans()) else None
            incident = replace(incident, restored_step=step, steps_lost=known)
        if level == ProgramLevel.MEMORY_TIER and draw(st.booleans()):
            incident = replace(incident, tiers={0: "own_ram", 1: "partner_ram"})
        if is_program and draw(st.booleans()):
            further = Fault(Cause.HANG, 3, 1001.0, "rank 0 is silent", rank=0)
            incident = incident.with_fault(further).with_decision(decision, Budget())
    at = 1000.5
    for phase in ("fence", "form", *(() if is_program else ("restore",)), "first_step"):
        at += draw(st.sampled_from([0.0, 0.0002, 0.25]))
        incident = incident.with_phase(phase, at)
    if draw(st.booleans()):
        code = draw(st.sampled_from(["", "user_error", "cancelled", "succeeded"]))
        why = f"the job ended: {code}" if code else "attempt 3 runs again"
        incident = incident.closed(1002.0, "first_step", why, code)
    return incident


def sentences(incident: Incident) -> Iterator[str]:
    """All that is said about it anywhere."""
    data, record = data_of(incident), IncidentRecord.of(incident)
    view = view_of(data)
    view = view.model_copy(update={"text": tuple(incident_text(view)), "title": "a fault"})
    yield from (part.text for part in view.text)
    yield from (line.plain for line in incident_lines(view))
    events: list[IncidentEvent] = [IncidentOpenedEvent.of(incident)]
    events += [IncidentUpdatedEvent.of(incident)]
    if incident.closed_at is not None:
        events += [IncidentClosedEvent.of(incident)]
    for event in events:
        yield event_text(event.kind, data)
        yield message("job", "name", 1, 5.0, event)["text"]
    for state in (State.RUNNING, State.RECOVERING, State.FAILED, State.CANCELLED):
        yield verdict(replace(RUNNING, state=state, ended_at=1002.0, last=record)).last or ""


@given(incidents())
def test_no_sentence_claims_what_the_record_does_not_have(incident: Incident) -> None:
    record = IncidentRecord.of(incident)
    for sentence in sentences(incident):
        for claim in CLAIMS:
            for said in re.finditer(claim.words, sentence):
                assert claim.is_true(record, said), (sentence, record)


@given(incidents(), st.none() | st.just(0.0) | st.floats(0.001, 1e7))
def test_the_cost_is_said_once_it_is_final_in_a_unit_that_fits(
    incident: Incident, lost_s: float | None
) -> None:
    cost = device_time(lost_s) if lost_s else ""
    view = view_of(data_of(incident)).model_copy(
        update={"device_seconds_lost": lost_s, "cost": cost}
    )
    text = " ".join(part.text for part in incident_text(view))
    facts = facts_of(view)
    said = COST.findall(text)
    assert ("incident cost" in text) is bool(said)
    assert said == ([cost] if cost and facts & {Fact.NEXT_RUNS, Fact.JOB_ENDED} else [])


@given(incidents())
def test_what_is_not_known_is_said_with_the_line_that_makes_it_known(incident: Incident) -> None:
    view = view_of(data_of(incident))
    text = [part.text for part in incident_text(view)]
    assert_readable(text)
    said = "\n".join(text)
    runs_again = Fact.NEXT_RUNS in facts_of(view)
    if runs_again and view.restored_step is None:
        assert "is not known at this level" in said
        if view.level == ProgramLevel.SCRIPT:
            assert "`holdfast.attach().step(step)`" in said and "`ray.train.report`" in said
    if runs_again and view.steps_lost is None:
        assert "How many steps were lost is not known" in said


@given(incidents())
def test_the_list_shows_no_number_of_steps_that_is_not_known(incident: Incident) -> None:
    at = [column.heading for column in COLUMNS].index("STEPS LOST")
    lost = _row(view_of(data_of(incident)))[at]
    assert lost == ("-" if incident.steps_lost is None else str(incident.steps_lost))


def test_every_sentence_of_the_table_is_read_by_some_incident() -> None:
    """A sentence that needs and lacks the same, or facts that exclude each other, says nothing."""
    for each in RESTORE_SENTENCES:
        assert each.needs and not each.needs & each.lacks


@pytest.mark.parametrize(("code", "mark"), [("", ":anchor:"), ("user_error", ":warning:")])
def test_the_incident_that_ended_the_job_has_another_mark(code: str, mark: str) -> None:
    fault = Fault(Cause.WORKER_CRASH, 1, 1.0, "rank 0 ended", rank=0)
    closed = Incident.opened(1, fault, 1.0).closed(2.0, "gather", "the end", code)
    content = message("job", "name", 1, 5.0, IncidentClosedEvent.of(closed))
    assert mark in webhook_messages.body(content, "slack").decode()


@pytest.mark.parametrize(
    ("seating", "action", "words"),
    [
        (SeatingResult(is_program=True), Action.REFORM, "the program starts again on all"),
        (SeatingResult(), Action.REFORM, "every process is alive and keeps its rank"),
        (SeatingResult(replaced=(1,)), Action.REPLACE_WORKER, "take rank 1"),
        (SeatingResult(anew="nothing is left"), Action.REPLACE_NODE, "nothing is left"),
    ],
)
def test_a_reason_says_of_processes_what_is_so(
    seating: SeatingResult, action: Action, words: str
) -> None:
    decision = applied_decision(None, seating)
    assert decision.action is action and words in decision.reason
    assert ("alive" in decision.reason) is (seating == SeatingResult())
