"""An outline of a chunk of metric rows: what long looks at a series read instead of its rows. Pure.

It holds the rows of the extremes, so that a chart of a hundred thousand steps shows every spike
that there was, and the sums that the account of a job's time needs. It is made anew whenever its
chunk is written; a chunk of before there were outlines has none, and is read in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_service.store.json_safe import number

CHARTED = ("loss", "grad_norm", "step_time_s", "loader_wait_s", "checkpoint_wait_s")
"""Columns whose extremes are kept; one that derives from another has its extremes with it."""
OWN = "own"
"""The column of the numbers that a user's function tells, by name."""


@dataclass(frozen=True)
class Outline:
    """`since`: when its first step began, `until`: when its last one ended, Unix seconds; `busy_s`:
    in its steps alone. `rows`: first, last and extreme ones, step -> values, ascending."""

    steps: int
    first: int
    last: int
    since: float
    until: float
    busy_s: float
    rows: Mapping[int, list[Any]]

    def data(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "first": self.first,
            "last": self.last,
            "since": self.since,
            "until": self.until,
            "busy_s": self.busy_s,
            "rows": {str(step): values for step, values in self.rows.items()},
        }


def outline(columns: tuple[str, ...], rows: Mapping[str, list[Any]]) -> Outline | None:
    """Of a chunk's rows, values in the order of `columns`; None where their times are unreadable:
    then the rows themselves must be read."""
    at, step_time = columns.index("at"), columns.index("step_time_s")
    ordered = sorted((int(step), values) for step, values in rows.items())
    times = [(number(values[at]), number(values[step_time])) for _, values in ordered]
    if not ordered or any(end is None or took is None for end, took in times):
        return None
    busy_us, since_us, cursor = 0, 0, None
    for end, took in times:
        assert end is not None and took is not None
        end_us = round(end * 1e6)
        start_us = end_us - round(took * 1e6)
        if cursor is None:
            since_us = start_us
        else:
            end_us, start_us = max(end_us, cursor), max(start_us, cursor)
        busy_us += max(0, end_us - start_us)
        cursor = end_us
    assert cursor is not None
    kept = {ordered[0][0], ordered[-1][0]}
    for name in CHARTED:
        if name in columns:
            column = columns.index(name)
            kept |= _extremes([(step, row[column]) for step, row in ordered if len(row) > column])
    kept |= _own_extremes(columns, ordered)
    return Outline(
        steps=len(ordered),
        first=ordered[0][0],
        last=ordered[-1][0],
        since=since_us / 1e6,
        until=cursor / 1e6,
        busy_s=busy_us / 1e6,
        rows={step: values for step, values in ordered if step in kept},
    )


def _own_extremes(columns: tuple[str, ...], ordered: list[tuple[int, list[Any]]]) -> set[int]:
    """The same of every series that the user's function tells."""
    if OWN not in columns:
        return set()
    column = columns.index(OWN)
    by_name: dict[str, list[tuple[int, Any]]] = {}
    for step, values in ordered:
        told = values[column] if column < len(values) else None
        for name, value in (told or {}).items():
            by_name.setdefault(name, []).append((step, value))
    return {step for one in by_name.values() for step in _extremes(one)}


def _extremes(stored: list[tuple[int, Any]]) -> set[int]:
    """The steps of the least and the largest of (step, value); also of one that is not finite."""
    kept: set[int] = set()
    finite: list[tuple[float, int]] = []
    for step, stored_value in stored:
        value = number(stored_value)
        if value is not None:
            finite.append((value, step))
        elif not kept:
            kept.add(step)
    if finite:
        kept |= {min(finite)[1], max(finite)[1]}
    return kept
