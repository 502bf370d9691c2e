"""Incidents and events read as sentences: for every cause, with realistic and with odd data."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.support.service.event_examples import recorded, wire_names
from tests.support.web.seed_story import STORY, Leg, incident

from holdfast.cli.printing.describe import incident_lines
from holdfast.cli.printing.event_text import SENTENCES, event_sentence
from holdfast.cli.printing.incident_text import (
    CAUSE_SENTENCES,
    incident_sentences,
    lost_sentence,
    ranks_text,
    tiers_text,
)
from holdfast.cli.printing.output import NodeIdShortener
from holdfast_service.job_model.events.codec import EVENT_TYPES
from holdfast_service.job_model.events.incidents import IncidentRecord
from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.policy.decision_ladder import Budget, Situation, decide
from holdfast_service.policy.incidents import Incident
from holdfast_service.views.incidents import BudgetView, IncidentView, MeshChangeView
from holdfast_workers.protocol.codec import as_json

NODE = "3f2a9c41" + "0" * 48
SIBLING = "3f2a9c41" + "0" * 8 + "1" * 40
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


def text_of(view: IncidentView, *, alternatives: bool = False) -> list[str]:
    return [line.plain.strip() for line in incident_lines(view, alternatives=alternatives)]


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
        assert not re.search(r"[0-9a-f]{32}", line), line


@pytest.mark.parametrize("cause", list(Cause))
def test_an_incident_of_every_cause_reads_as_sentences(cause: Cause) -> None:
    lines = text_of(incident_of(cause))
    assert_readable(lines)
    assert f"{CAUSE_SENTENCES[cause.value]} ({cause.value})." in lines[0]
    assert any("node 3f2a9c41)" in line for line in lines)
    assert sum("alternative" in line for line in lines) == 1
    assert any(line.startswith("The decision was to ") for line in lines)


def test_there_is_a_sentence_for_every_cause_and_no_other() -> None:
    assert set(CAUSE_SENTENCES) == {cause.value for cause in Cause}


@pytest.mark.parametrize("view", seeded_incidents(), ids=lambda view: view.cause)
def test_a_realistic_incident_reads_as_sentences(view: IncidentView) -> None:
    lines = text_of(view)
    assert_readable(lines)
    assert len(lines) < 20
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


def test_the_refused_alternatives_are_listed_on_request_only() -> None:
    view = incident_of(Cause.NODE_LOST)
    folded, listed = text_of(view), text_of(view, alternatives=True)
    assert (
        f"{len(view.refused)} alternatives were refused; "
        "`holdfast incidents JOB 1 --alternatives` lists them."
    ) in folded
    assert not any("'stop'" in line for line in folded)
    for other in view.refused:
        assert any(line.startswith(f"The alternative '{other.decision}' was") for line in listed)
    one = view.model_copy(update={"refused": view.refused[:1]})
    assert any(line.startswith("1 alternative was refused;") for line in text_of(one))


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
    lines = text_of(IncidentView.model_validate(document))
    assert ": gamma ray (gamma_ray)." in lines[0]
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
    assert not any("lost" in line or "affected" in line for line in lines)


def test_node_ids_are_cut_to_what_is_unique_among_those_seen() -> None:
    shorten = NodeIdShortener([NODE])
    assert shorten(f"node {NODE}, host 10.0.0.1") == "node 3f2a9c41, host 10.0.0.1"
    assert shorten(SIBLING) == SIBLING[:17], "a second id with the same first digits: one more"
    assert shorten(NODE) == NODE[:17]
    assert shorten("f" * 64) == "f" * 64, "a digest is not a node id"
    view = incident_of(Cause.HANG)
    assert any(NODE[:17] in text for text in incident_sentences(view, shorten))


@pytest.mark.parametrize("kind", sorted(SENTENCES))
def test_an_event_of_every_kind_is_a_sentence_with_and_without_its_fields(kind: str) -> None:
    names = set(re.findall(r"\{(\w+)\}", SENTENCES[kind]))
    for data in (dict.fromkeys(names, "x1"), dict.fromkeys(names, None), dict.fromkeys(names, 4)):
        text = event_sentence(kind, data)
        assert SENTENCE.match(text), text
        assert not re.search(r"[{}\[\]]|None", text), text


def test_every_event_kind_has_a_sentence_of_its_own_fields() -> None:
    assert set(SENTENCES) == set(EventKind)
    for kind, template in SENTENCES.items():
        named = set(re.findall(r"\{(\w+)\}", template))
        assert named <= wire_names(EVENT_TYPES[kind]), kind


@pytest.mark.parametrize(("kind", "data"), recorded())
def test_a_recorded_event_reads_as_a_sentence(kind: str, data: dict[str, Any]) -> None:
    text = event_sentence(kind, data)
    assert text
    assert "?" not in text


def test_events_read_as_sentences() -> None:
    forming = {"attempt": 2, "mesh": {"dp_shard": 2, "tp": 2}, "world_size": 4, "members": []}
    assert event_sentence("attempt.forming", forming) == (
        "Attempt 2 is forming with 4 ranks on the mesh dp_shard 2 × tp 2."
    )
    opened = {"incident": 1, "cause": "node_lost", "evidence": ["agent n1 is lost"]}
    assert event_sentence("incident.opened", opened) == (
        "Incident 1 was opened, because a node was lost: agent n1 is lost."
    )
    assert event_sentence("job.state", {"from": "QUEUED", "to": "STARTING", "reason": None}) == (
        "The state changed from QUEUED to STARTING."
    )
    unknown = {"agent": "n1", "sure": False, "parts": [1, 2], "share": 0.123456}
    assert event_sentence("new.kind", unknown) == (
        "The event reports agent n1, parts (2 items), share 0.1235."
    )
    assert event_sentence("new.kind", {}) == ""
