"""A recipe whose ranks have a clock that does not count the pauses of their machine, like that of a
guest whose hypervisor pauses it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from tests.support.ranks.step_log import LogsSteps

from holdfast_workers.training.recipe import World

UNCOUNTED = "HOLDFAST_TEST_UNCOUNTED"
"""Environment variable: a folder with a file for each process that was paused, named by its id, of
the seconds that its clock has not counted."""

_clock_gettime = time.clock_gettime


def _lagging(clock: int) -> float:
    lag_s = 0.0
    if clock == time.CLOCK_BOOTTIME:
        with contextlib.suppress(FileNotFoundError):
            lag_s = float((Path(os.environ[UNCOUNTED]) / str(os.getpid())).read_text())
    return _clock_gettime(clock) - lag_s


class PausableClock(LogsSteps):
    def build(self, world: World) -> None:
        time.clock_gettime = _lagging
        super().build(world)
