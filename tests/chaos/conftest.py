"""The undisturbed reference run of the chaos tests, made once per session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.nodes.supervised import small_training, supervised

from holdfast_workers.protocol.messages import StepRow

STEPS = 60
ENDS_WHEN_TOLD = "tests.support.ranks.recipes:EndsWhenTold"
"""The recipe of a job that ends only after `wait_end` is called, with the same bits."""


@dataclass(frozen=True)
class Undisturbed:
    digests: dict[int, str]
    rows: dict[int, StepRow]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    """Digests and rows of `small_training(STEPS)` without faults."""
    folder: Path = tmp_path_factory.mktemp("undisturbed")
    with supervised(folder, small_training(STEPS), standbys=0) as run:
        end = run.wait_end()
        assert end["outcome"] == "SUCCEEDED", run.story()
        assert sorted(run.digests) == list(range(STEPS + 1))
        yield Undisturbed(dict(run.digests), dict(run.rows))
