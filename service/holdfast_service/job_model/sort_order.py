"""Orders of a list of jobs. Apart from the list's views: who names one loads nothing else."""

from __future__ import annotations

from enum import StrEnum


class Sort(StrEnum):
    CREATED = "created"  # newest first
    NAME = "name"
    STATE = "state"  # what needs looking at first: see listing.STATES
    GOODPUT = "goodput"  # worst first; jobs without one last
