"""A test tells the ranks of its job that the job may end now: by a file."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.waiting import eventually

VARIABLE = "HOLDFAST_TEST_MAY_END"


def forbid(file: Path) -> None:
    """Jobs of `EndsWhenTold` that start from now on wait for `file`."""
    os.environ[VARIABLE] = str(file)


def allow() -> None:
    Path(os.environ[VARIABLE]).touch()


def wait() -> None:
    eventually(Path(os.environ[VARIABLE]).exists, 60.0)
