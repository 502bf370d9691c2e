"""The page on the recovery policy has the table that the code generates."""

from __future__ import annotations

from pathlib import Path

from holdfast_service.policy.causes import Cause
from holdfast_service.policy.decision_ladder import Action
from holdfast_service.policy.decision_table import (
    decision_for,
    possible_situations,
    rows,
    updated_page,
)

PAGE = Path(__file__).parents[3] / "docs" / "recovery-policy.md"


def test_the_page_has_the_table_of_the_current_code() -> None:
    page = PAGE.read_text()
    assert updated_page(page) == page, (
        "decisions have changed: run python -m holdfast_service.policy.decision_table " + PAGE.name
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
