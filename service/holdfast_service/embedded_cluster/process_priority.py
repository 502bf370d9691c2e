"""Which work on a machine goes first: training, before what watches it; users, before a clean-up.

Linux shares the processors out between sessions before it looks at the niceness of processes
(sched(7), "the autogroup feature"). The embedded cluster is one session and each rank one of its
own, so that a session's autogroup is where what watches can step back; a mere `nice` would also
be inherited by the ranks.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

BEHIND_TRAINING = 9
"""An eighth of a rank's share where both want the same processor; a late turn, never none.

What recovers waits for the ranks: under a kill per second, training kept 0.29 of its speed with
nobody behind (0), 0.34 and 0.35 at 5, 0.44 at 9, 0.38 and 0.43 at 12 (two minutes each).
"""
_COLLECTED = (2_000, 5, 500)
"""Objects made until the youngest are looked through; how often that is until older ones are, and
all. Of a hundred thousand, as many as (5_000, 20) lets come together, one look takes 0.08 s."""


def step_back(niceness: int = BEHIND_TRAINING) -> bool:
    """Let the other sessions of this machine go first; for the leader of a session only.

    False where that cannot be had: the session is somebody else's (a user's terminal), or the
    kernel has no autogroups. Nothing is lost then but the courtesy.
    """
    if os.getsid(0) != os.getpid():
        return False
    try:
        Path("/proc/self/autogroup").write_text(str(niceness))
    except OSError:
        return False
    return True


def collect_seldom() -> None:
    """Python looks through all objects of a process for garbage now and then, and everybody waits
    meanwhile: a tenth of a second in a server. What is there by now, modules above all, stays
    anyway and is not looked through again; the rest is less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTED)
