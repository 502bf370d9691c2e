"""Whether a job keeps checkpoints in memory: the same for all plug-ins."""

from __future__ import annotations

import os
from collections.abc import Mapping

MEMORY_VARIABLE = "HOLDFAST_MEMORY_STEPS"
"""`checkpoint.memory.every_steps` of the spec. A plug-in uses it only as a switch: the interval is
that of its framework."""


def keeps_in_memory(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether the job has a memory tier."""
    return variables.get(MEMORY_VARIABLE, "0") != "0"
