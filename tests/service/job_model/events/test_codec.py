"""Events survive JSON, of this version, of older ones and of newer ones."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.service.event_examples import (
    any_event,
    recorded,
    wire_names,
    with_unknown_fields,
)

from holdfast_service.job_model.events.codec import (
    EVENT_TYPES,
    UnknownEvent,
    decode,
    encode,
    numbered,
    read_event,
)
from holdfast_service.job_model.events.kinds import EventKind
from holdfast_service.job_model.events.progress import EndedEvent
from holdfast_service.job_model.supervisor_protocol import SupervisorEvent
from holdfast_workers.protocol.codec import UnreadableDocument


def through_json(data: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(data)
    decoded: dict[str, Any] = json.loads(text)
    return decoded


@pytest.mark.parametrize("kind", sorted(EventKind))
def test_an_event_of_every_kind_survives_json(kind: EventKind) -> None:
    @settings(max_examples=12)
    @given(any_event(kind))
    def survives(event: Any) -> None:
        data = encode(event)
        assert data == through_json(data), "JSON values only"
        assert set(data) <= wire_names(type(event))
        assert decode(kind, data) == event

    survives()


@pytest.mark.parametrize("kind", sorted(EventKind))
def test_fields_of_a_newer_version_are_ignored(kind: EventKind) -> None:
    @settings(max_examples=12)
    @given(any_event(kind))
    def ignored(event: Any) -> None:
        newer = with_unknown_fields(type(event), through_json(encode(event)))
        assert "of_a_newer_version" in newer
        assert decode(kind, newer) == event

    ignored()


@pytest.mark.parametrize(("kind", "data"), recorded())
def test_a_recorded_event_decodes_to_the_same_json(kind: str, data: dict[str, Any]) -> None:
    event = decode(kind, data)
    assert not isinstance(event, UnknownEvent)
    assert encode(event) == data


def test_every_kind_is_recorded_and_has_one_class() -> None:
    assert {kind for kind, _ in recorded()} == set(EventKind) == set(EVENT_TYPES)


@pytest.mark.parametrize(("kind", "data"), recorded())
def test_a_missing_field_has_its_default(kind: str, data: dict[str, Any]) -> None:
    event_type = EVENT_TYPES[kind]
    whole = decode(kind, data)
    for field in fields(event_type):
        if field.name == event_type.merged:
            continue  # its own fields are in `data`
        less = {name: value for name, value in data.items() if name != field.name}
        if field.default is not MISSING:
            assert getattr(decode(kind, less), field.name) == field.default
        elif field.default_factory is not MISSING:
            assert getattr(decode(kind, less), field.name) == field.default_factory()
        elif len(less) < len(data):
            with pytest.raises(UnreadableDocument, match=field.name):
                decode(kind, less)
    assert decode(kind, data) == whole


@given(st.text(max_size=10), st.dictionaries(st.text(max_size=5), st.integers(), max_size=3))
def test_an_unknown_kind_keeps_its_data(kind: str, data: dict[str, Any]) -> None:
    event = decode(f"newer.{kind}", data)
    assert event == UnknownEvent(f"newer.{kind}", data)
    assert encode(event) == data


def test_data_that_do_not_fit_the_kind_are_refused_with_their_place() -> None:
    forming = {"attempt": 1, "mesh": {}, "world_size": 1, "members": [{"rank": "first"}]}
    with pytest.raises(
        UnreadableDocument, match=r"AttemptFormingEvent: members\.0\.rank: .*integer"
    ):
        decode("attempt.forming", forming)


def test_text_of_any_kind_survives() -> None:
    ended = EndedEvent(message="a \0 b \ud800", traceback="\udfff")
    assert decode("ended", encode(ended)) == ended


def test_a_numbered_event_is_read_by_its_kind() -> None:
    assert read_event(numbered(1, 0.0, EndedEvent())) == EndedEvent()
    newer = SupervisorEvent(2, 0.0, "ended.twice", {"n": 2})
    assert read_event(newer) == UnknownEvent("ended.twice", {"n": 2})
