"""The documents between API servers and supervisors survive the codec."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.protocol.messages import example, expanded, name_of, values_of

from holdfast_service.cluster.agent_actor import AgentSeat
from holdfast_service.job_model.supervisor_protocol import (
    AvoidOrder,
    Cursors,
    FaultOrder,
    JobLaunch,
    StopOrder,
    SupervisorReport,
)
from holdfast_workers.protocol import codec

KINDS = (
    *(AgentSeat, JobLaunch, Cursors, SupervisorReport),
    *(StopOrder, FaultOrder, AvoidOrder),
)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_document_survives_the_codec(kind: type, data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    assert codec.decode(codec.encode(value), kind) == value


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_unknown_fields_at_any_level_are_ignored(kind: type) -> None:
    value = example(kind)
    assert codec.decode(expanded(value), *KINDS) == value
    assert name_of(value) == kind.__name__
