"""Jobs that cannot succeed end soon with a cause, and use no standbys (P5)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.nodes.supervised import small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind

pytestmark = pytest.mark.chaos


@pytest.mark.cell("P5", "users code")
def test_a_user_error_ends_the_job_with_its_traceback_and_uses_no_standby(
    tmp_path: Path,
) -> None:
    training = small_training(60, recipe="tests.support.ranks.recipes:RaisesAtStepTen")
    with supervised(tmp_path, training, standbys=1) as run:
        end = run.wait_end()
        assert (end["outcome"], end["code"]) == ("FAILED", "user_error"), run.story()
        assert "the user's own mistake" in end["traceback"]
        assert end["step"] in (8, 9)  # the last row may be unreported
        attempts = [event["members"] for event in run.of(EventKind.ATTEMPT_FORMING)]
        assert {member["agent"] for members in attempts for member in members} == {"n0", "n1"}
        assert len({tuple(member["pid"] for member in members) for members in attempts}) == 1


def test_a_recipe_that_cannot_be_imported_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    training = small_training(60, recipe="tests.support.ranks.recipes:NoSuchRecipe")
    with supervised(tmp_path, training, standbys=0) as run:
        end = run.wait_end()
        assert end["outcome"] == "FAILED", run.story()
        assert "NoSuchRecipe" in end["message"]
