"""The table of decisions has every cause, situation and action."""

from __future__ import annotations

from holdfast_service.policy.causes import Cause
from holdfast_service.policy.decision_ladder import Action
from holdfast_service.policy.decision_table import (
    decision_for,
    possible_situations,
    rows,
)


def test_every_cause_has_a_decision_for_all_possible_situations() -> None:
    table_rows = list(rows())
    assert {cause for cause, *_ in table_rows} == {f"`{cause.value}`" for cause in Cause}
    for cause in Cause:
        for known in possible_situations(cause):
            decision = f"`{decision_for(cause, known).action.value}`"
            assert any(row[0] == f"`{cause.value}`" and decision in row[3] for row in table_rows)
    reached = {action for action in Action for row in table_rows if f"`{action.value}`" in row[3]}
    assert reached == set(Action)
