"""Processes below this one, such as those of the agents of a test."""

from __future__ import annotations

from contextlib import suppress

import psutil


def named(name: str) -> list[psutil.Process]:
    """Those with this name that have not ended."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if process.name() == name and process.is_running():
                found.append(process)
    return found
