"""The documents between API servers and supervisors survive the codec."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.protocol.messages import example, expanded, name_of, values_of
from tests.support.service.valid_specs import documents

from holdfast_service.cluster.agent_actor import AgentSeat
from holdfast_service.job_model.job_spec import parse
from holdfast_service.job_model.supervisor_protocol import (
    AvoidOrder,
    Cursors,
    FaultOrder,
    JobPlan,
    StopOrder,
    SupervisorReport,
)
from holdfast_workers.protocol import codec

KINDS = (
    *(AgentSeat, JobPlan, Cursors, SupervisorReport),
    *(StopOrder, FaultOrder, AvoidOrder),
)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_document_survives_the_codec(kind: type, data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    assert codec.decode(codec.encode(value), kind) == value


@settings(max_examples=40, deadline=None)
@given(document=documents())
def test_a_spec_of_any_values_is_the_same_at_the_other_end(document: dict[str, Any]) -> None:
    plan = JobPlan("job", parse(document, None))
    assert codec.decode(codec.encode(plan), JobPlan) == plan


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_unknown_fields_at_any_level_are_ignored(kind: type) -> None:
    value = example(kind)
    assert codec.decode(expanded(value), *KINDS) == value
    assert name_of(value) == kind.__name__
