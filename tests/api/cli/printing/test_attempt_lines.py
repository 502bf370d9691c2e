"""What the commands print of the state that an attempt starts from."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from holdfast.cli.printing.describe import _print_attempt
from holdfast.cli.printing.output import NodeIdShortener
from holdfast_service.views.attempts import AttemptView, RestoreView

OFFERED = RestoreView(step=100, tiers={"0": "own_ram"}, newest={"own_ram": 100})


@pytest.mark.parametrize(
    ("restore", "is_program", "said"),
    [
        (OFFERED, False, "restored step 100 from own RAM"),
        (OFFERED, True, "was offered step 100 from own RAM"),
        (RestoreView(step=90), True, "went on from step 90, as the program's first step tells"),
        (RestoreView(step=None), True, ""),
    ],
)
def test_a_program_is_said_to_be_offered_a_state(
    restore: RestoreView, is_program: bool, said: str
) -> None:
    attempt = AttemptView(
        number=2,
        state="running",
        mesh={},
        world_size=1,
        members=(),
        standbys=(),
        restore=restore,
        cause_incident=None,
        joined={},
        first_step=500,
        last_step=None,
        forming_at=1.0,
        running_at=2.0,
        ended_at=None,
        reason=None,
    )
    written = StringIO()
    _print_attempt(Console(file=written, width=120), attempt, NodeIdShortener([]), is_program)
    text = written.getvalue()
    assert said in text and "steps 500 to -" in text
    assert ("step 90" in text or "step 100" in text) == bool(said)
