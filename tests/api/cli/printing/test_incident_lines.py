"""An incident as the commands print it: the server's sentences, with node ids cut."""

from __future__ import annotations

from holdfast.cli.printing.describe import incident_lines
from holdfast.cli.printing.output import NodeIdShortener
from holdfast_service.policy.incident_parts import RefusedDecision
from holdfast_service.views.incidents import IncidentSentence, IncidentView, SentenceSubject

NODE = "3f2a9c41" + "0" * 48
SIBLING = "3f2a9c41" + "0" * 8 + "1" * 40
REFUSED = [f"The alternative '{name}' was refused: no." for name in ("wait", "stop")]
INCIDENT = IncidentView(
    number=1,
    title="a node was lost",
    text=(
        IncidentSentence(about=SentenceSubject.EVIDENCE, text=f"Evidence: node {NODE} is silent."),
        *(IncidentSentence(about=SentenceSubject.REFUSED, text=text) for text in REFUSED),
        IncidentSentence(about=SentenceSubject.END, text="The incident is still open."),
    ),
    cause="node_lost",
    attempt=2,
    lost=(),
    evidence=(f"node {NODE} is silent",),
    decision=None,
    reason=None,
    refused=(
        RefusedDecision(decision="wait", why="no"),
        RefusedDecision(decision="stop", why="no"),
    ),
    restored_step=None,
    steps_lost=None,
    tiers={},
    phases_s={},
    opened_at=1000.0,
    closed_at=None,
    resolution=None,
)


def text_of(view: IncidentView, *, alternatives: bool = False) -> list[str]:
    lines = incident_lines(view, job="0a1b2c3d", alternatives=alternatives)
    return [line.plain.strip() for line in lines]


def test_an_incident_is_printed_in_the_sentences_of_the_server() -> None:
    heading, *lines = text_of(INCIDENT)
    assert heading.endswith(" in attempt 2: a node was lost (node_lost).")
    assert lines == [
        "Evidence: node 3f2a9c41 is silent.",
        "2 alternatives were refused; `holdfast incidents 0a1b2c3d 1 --alternatives` lists them.",
        "The incident is still open.",
    ]


def test_the_refused_alternatives_are_listed_on_request_only() -> None:
    assert text_of(INCIDENT, alternatives=True)[2:4] == REFUSED
    one = INCIDENT.model_copy(update={"refused": INCIDENT.refused[:1]})
    assert any(line.startswith("1 alternative was refused;") for line in text_of(one))


def test_a_followed_job_says_nothing_of_the_refused_alternatives() -> None:
    assert not any("alternative" in line.plain for line in incident_lines(INCIDENT))


def test_node_ids_are_cut_to_what_is_unique_among_those_seen() -> None:
    shorten = NodeIdShortener([NODE])
    assert shorten(f"node {NODE}, host 10.0.0.1") == "node 3f2a9c41, host 10.0.0.1"
    assert shorten(SIBLING) == SIBLING[:17], "a second id with the same first digits: one more"
    assert shorten(NODE) == NODE[:17]
    assert shorten("f" * 64) == "f" * 64, "a digest is not a node id"
    assert any(NODE[:17] in line.plain for line in incident_lines(INCIDENT, shorten))
