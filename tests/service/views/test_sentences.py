"""Incidents and events as sentences: of every kind and cause, with realistic and with odd data."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from tests.support.service.event_examples import recorded, wire_names
from tests.support.web.seed_story import STORY, Leg, incident

from holdfast_service.job_model.events.codec import EVENT_TYPES
from holdfast_service.job_model.events.incidents import IncidentRecord
from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.memory_protection import MemoryProtection, Odds
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.decision_ladder import Budget, Situation, decide
from holdfast_service.policy.incidents import Incident
from holdfast_service.views.cause_words import CAUSES
from holdfast_service.views.checkpoints import memory_place
from holdfast_service.views.event_text import SENTENCES, event_text, event_until
from holdfast_service.views.incident_text import (
    incident_text,
    incident_title,
    lost_sentence,
    tiers_text,
)
from holdfast_service.views.incidents import (
    BudgetView,
    IncidentView,
    MeshChangeView,
    SentenceSubject,
)
from holdfast_service.wording import device_share, device_time, ranks_text
from holdfast_workers.protocol.codec import as_json

NODE = "3f2a9c41" + "0" * 48
SENTENCE = re.compile(r"^[^a-z].*[.!?]$|^[a-z]+\d.*[.!?]$")
"""Starts with a capital letter or an identifier such as `n1`, and ends with a full stop."""


def view_of(data: dict[str, Any]) -> IncidentView:
    """The view of an incident event, as the server builds it."""
    fields = {name: data[name] for name in IncidentView.model_fields if name in data}
    budget = fields.pop("budget", None)
    return IncidentView(
        number=data["incident"],
        budget=BudgetView(**budget) if budget else None,
        **fields,
    )


def incident_of(cause: Cause) -> IncidentView:
    """An incident with that cause, built by the recovery policy itself."""
    fault = Fault(
        cause,
        attempt=2,
        at=1000.0,
        what=f"rank 3 on n1 (node {NODE}) failed at step 33",
        rank=3,
        worker="n1.a.3",
        agent="n1",
        on_notice=cause is Cause.PREEMPTED,
    )
    budget = Budget()
    opened = Incident.opened(1, fault, 1000.5)
    decided = opened.with_decision(decide(Situation(cause, what=fault.what, room=True)), budget)
    decided = decided.with_phase("restore", 1000.53)
    return view_of(data_of(decided.closed(1001.0, "first_step", "attempt 3 made its first step")))


def data_of(incident: Incident) -> dict[str, Any]:
    return as_json(IncidentRecord.of(incident))


def text_of(view: IncidentView) -> list[str]:
    return [part.text for part in incident_text(view)]


def seeded_incidents() -> list[IncidentView]:
    leg = Leg(attempt=1, first=1, last=1000, forming_at=0.0, since=71.0)
    return [
        view_of(incident(number, fault, leg, 500.0, 510.0))
        for number, fault in enumerate(STORY, start=1)
    ]


def assert_readable(lines: list[str]) -> None:
    for line in lines:
        assert SENTENCE.match(line), line
        assert not re.search(r"\b(on_notice|node_id|True|False|None)\b|[{}\[\]]", line), line


@pytest.mark.parametrize("cause", list(Cause))
def test_an_incident_of_every_cause_reads_as_sentences(cause: Cause) -> None:
    view = incident_of(cause)
    lines = text_of(view)
    assert_readable(lines)
    assert incident_title(view) == CAUSES[cause].clause
    assert any(f"node {NODE})" in line for line in lines)
    assert sum("alternative" in line for line in lines) == len(view.refused)
    assert any(line.startswith("The decision was to ") for line in lines)


@pytest.mark.parametrize(
    ("attempts", "failed"), [(2, "attempt 2 then failed too"), (240, "each attempt up to 240 then")]
)
def test_attempts_that_fail_for_want_of_data_are_one_sentence(attempts: int, failed: str) -> None:
    fault = Fault(Cause.DATA_UNAVAILABLE, 1, 1000.0, "rank 0 waited", 0, "n0.1", "n0")
    decision = decide(Situation(fault.cause, what=fault.what))
    found = Incident.opened(1, fault, 1000.0).with_decision(decision, Budget())
    for attempt in range(2, attempts + 1):
        found = replace(found, next_attempt=attempt).with_fault(replace(fault, attempt=attempt))
        found = found.with_decision(decision, Budget())
    lines = text_of(view_of(data_of(found)))
    (earlier,) = (line for line in lines if line.startswith("After attempt"))
    assert earlier.startswith("After attempt 1 (data of the job did not come to a node in time),")
    assert failed in earlier
    assert sum(line.startswith("Rank 0 on agent n0") for line in lines) == 1


def test_there_are_words_for_every_cause() -> None:
    assert set(CAUSES) == set(Cause)


@pytest.mark.parametrize("view", seeded_incidents(), ids=lambda view: view.cause)
def test_a_realistic_incident_reads_as_sentences(view: IncidentView) -> None:
    lines = text_of(view)
    assert_readable(lines)
    assert max(map(len, lines)) < 500, "1,024 ranks are shown as ranges"


def test_a_hang_shows_its_suspects_and_its_stacks() -> None:
    (hang,) = (view for view in seeded_incidents() if view.cause == "hang")
    text = "\n".join(text_of(hang))
    assert (
        "Rank 613 on agent n76 is suspected with a score of 0.93: 1,023 ranks wait for it" in text
    )
    assert "Ranks 0 to 612 and 614 to 1023 were in all_reduce (torch" in text
    assert ", called from readinto (" in text
    assert ", and 1 more." in text


def test_the_refused_alternatives_are_sentences_of_their_own() -> None:
    view = incident_of(Cause.NODE_LOST)
    refused = [part.text for part in incident_text(view) if part.about == SentenceSubject.REFUSED]
    assert len(refused) == len(view.refused)
    for text, other in zip(refused, view.refused, strict=True):
        assert text.startswith(f"The alternative '{other.decision}' was refused: ")


def test_a_notice_is_words_only_if_there_was_one() -> None:
    view = incident_of(Cause.PREEMPTED)
    (item,) = view.lost
    noticed = "Rank 3 on agent n1 (process n1.a.3) was lost, after the cluster had announced"
    assert lost_sentence(item, view).startswith(noticed)
    crash = incident_of(Cause.WORKER_CRASH)
    assert lost_sentence(crash.lost[0], crash) == "Rank 3 on agent n1 (process n1.a.3) was lost."


def test_an_open_incident_has_no_decision_and_no_end_yet() -> None:
    fault = Fault(Cause.AGENT_LOST, attempt=1, at=5.0, what="agent n1 is lost", agent="n1")
    lines = text_of(view_of(data_of(Incident.opened(1, fault, 5.5))))
    assert_readable(lines)
    assert "Agent n1 was lost." in lines
    assert "No decision has been made yet." in lines
    assert "The incident is still open." in lines


def test_unknown_causes_keys_tiers_and_phases_are_tolerated() -> None:
    odd = {
        "cause": "gamma_ray",
        "lost": ({"planet": "earth", "rank": 3}, {"agent": None}),
        "suspects": ({"rank": 1, "score": 0.5, "mood": "bad"},),
        "stacks": ({"ranks": [1], "frames": []},),
        "tiers": {"0": "tape", "1": "own_ram"},
        "phases_s": {"teleport": 0.2, "restore": None, "total": 0.3},
    }
    document = incident_of(Cause.HANG).model_dump(mode="json") | odd
    view = IncidentView.model_validate(document)
    lines = text_of(view)
    assert incident_title(view) == "gamma ray"
    assert "Rank 3 was lost." in lines
    assert "Rank 1 is suspected with a score of 0.50." in lines
    assert "Rank 1 was at an unknown place." in lines
    assert "The state came from tape (rank 0); own RAM (rank 1)." in lines
    assert "The recovery took 300 ms: 200 ms for teleport." in lines


def test_ranks_are_shown_as_ranges() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([1, 0]) == "ranks 0 and 1"
    assert ranks_text([0, 1, 2, 5, 7, 8]) == "ranks 0 to 2, 5, 7 and 8"
    assert ranks_text(range(0, 64, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12 and others (32 in all)"
    assert tiers_text({"3": "partner_ram", "1": "own_ram", "0": "own_ram"}) == (
        "own RAM (ranks 0 and 1); a partner's RAM (rank 3)"
    )


def test_a_change_of_the_mesh_is_a_sentence_and_a_resize_loses_nothing() -> None:
    change = MeshChangeView(
        before={"dp_shard": 3, "tp": 2},
        after={"dp_shard": 4, "tp": 2},
        ranks_before=6,
        ranks_after=8,
    )
    view = incident_of(Cause.RESIZE).model_copy(update={"mesh_change": change})
    lines = text_of(view)
    assert_readable(lines)
    sentence = "The mesh changed from dp_shard 3 × tp 2 (6 ranks) to dp_shard 4 × tp 2 (8 ranks)."
    assert sentence in lines
    assert incident_title(view) == "the world grew from 6 to 8 ranks"
    assert not any("lost" in line or "affected" in line for line in lines)


@pytest.mark.parametrize("kind", sorted(SENTENCES))
def test_an_event_of_every_kind_is_a_sentence_with_and_without_its_fields(kind: str) -> None:
    names = set(re.findall(r"\{(\w+)\}", SENTENCES[kind]))
    for data in (dict.fromkeys(names, "x1"), dict.fromkeys(names, None), dict.fromkeys(names, 4)):
        text = event_text(kind, data)
        assert SENTENCE.match(text), text
        assert not re.search(r"[{}\[\]]|None", text), text


def test_every_event_kind_has_a_sentence_of_its_own_fields() -> None:
    assert set(SENTENCES) == set(EventKind)
    for kind, template in SENTENCES.items():
        named = set(re.findall(r"\{(\w+)\}", template))
        assert named <= wire_names(EVENT_TYPES[kind]), kind


@pytest.mark.parametrize(("kind", "data"), recorded())
def test_a_recorded_event_reads_as_a_sentence(kind: str, data: dict[str, Any]) -> None:
    text = event_text(kind, data)
    assert text
    assert "?" not in text


def test_events_read_as_sentences() -> None:
    forming = {"attempt": 2, "mesh": {"dp_shard": 2, "tp": 2}, "world_size": 4, "members": []}
    assert event_text("attempt.forming", forming) == (
        "Attempt 2 is forming with 4 ranks on the mesh dp_shard 2 × tp 2."
    )
    opened = {"incident": 1, "cause": "node_lost", "evidence": ["agent n1 is lost"]}
    assert event_text("incident.opened", opened) == (
        "Incident 1 was opened, because a node was lost: agent n1 is lost."
    )
    assert event_text("job.state", {"from": "QUEUED", "to": "STARTING", "reason": None}) == (
        "The state changed from QUEUED to STARTING."
    )
    endless = {"incident": 1, "phases_s": {"total": math.inf}, "evidence": {"0": ""}}
    assert event_text("incident.closed", endless).startswith("Incident 1 was closed")
    assert event_text("incident.opened", endless).startswith("Incident 1 was opened")
    unknown = {"agent": "n1", "sure": False, "parts": [1, 2], "share": 0.123456}
    assert event_text("new.kind", unknown) == (
        "The event reports agent n1, parts (2 items), share 0.1235."
    )
    assert event_text("new.kind", {}) == ""
    nodes = [event_text("job.resize_requested", {"nodes": count}) for count in (3, None)]
    assert nodes == [
        "A user ordered at most 3 nodes.",
        "A user ordered as many nodes as the job may have.",
    ]


def test_the_end_of_a_wait_is_a_time_beside_the_sentence() -> None:
    waiting = {"resource": "nodes", "reason": "2 of 4 are free", "until": 90.5}
    assert event_text("waiting", waiting) == "The job waits for nodes: 2 of 4 are free."
    assert event_until("waiting", waiting) == 90.5
    assert event_until("node.draining", {"deadline": 7}) == 7.0
    assert event_until("new.kind", {"deadline": 7}) is None
    assert event_until("waiting", {"until": None}) is None


@pytest.mark.parametrize(
    ("part_s", "whole_s", "shown"),
    [
        (0.0, 340.0, "0.0 of 340 device-seconds"),
        (42.4, 340.0, "42 of 340 device-seconds"),
        (12.0, 64_000.0, "12 device-seconds of 17.78 device-hours"),
        (2880.0, 64_000.0, "0.80 of 17.78 device-hours"),
        (7200.0, 64_000.0, "2.00 of 17.78 device-hours"),
    ],
)
def test_device_time_below_an_hour_is_no_zero_of_hours(
    part_s: float, whole_s: float, shown: str
) -> None:
    assert device_share(part_s, whole_s) == shown
    assert device_time(whole_s) == shown.rpartition("of ")[2]


def _protection(copies: int, after_one_lost: float) -> MemoryProtection:
    return MemoryProtection(copies, {}, {1: Odds(after_one_lost, 0.0)}, ())


@pytest.mark.parametrize(
    ("step", "memory", "expected"),
    [
        (None, None, "nothing was saved in this attempt so far"),
        (40, None, "of an earlier attempt"),
        (40, _protection(1, 1.0), "1 copy on other nodes"),
        (None, _protection(2, 1.0), "no step has its copies on other nodes yet"),
        (40, _protection(0, 0.5), "some ranks have no copy on another node"),
        (40, _protection(0, 0.0), "on the node of each rank only: it outlives processes, not the"),
        (None, _protection(0, 0.0), "on the node of each rank only"),
    ],
)
def test_the_place_of_memory_checkpoints_is_where_they_are(
    step: int | None, memory: MemoryProtection | None, expected: str
) -> None:
    assert memory_place(step, memory, ended=False).startswith(expected)
    assert memory_place(step, memory, ended=True) == "none: they end with the job"
