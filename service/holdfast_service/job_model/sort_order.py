"""The sort orders of the job list. Separate from the list's views, so that an import is cheap."""

from __future__ import annotations

from enum import StrEnum


class Sort(StrEnum):
    CREATED = "created"  # newest first
    NAME = "name"
    STATE = "state"  # jobs that need attention first: see listing.STATES
    GOODPUT = "goodput"  # worst first; jobs that have just started, or without one, last
