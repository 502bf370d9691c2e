"""Which work on a machine goes first: training, before what watches it.

Linux shares the processors out between sessions before it looks at the niceness of processes
(sched(7), "the autogroup feature"). The embedded cluster is one session and each rank one of its
own, so that a session's autogroup is where what watches can step back; a mere `nice` would also
be inherited by the ranks.
"""

from __future__ import annotations

import os
from pathlib import Path

BEHIND_TRAINING = 5
"""A third of a rank's share where both want the same processor; a late turn, never none."""


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
