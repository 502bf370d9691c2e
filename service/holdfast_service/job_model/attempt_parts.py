"""The parts of an attempt, as its events and the API have them. Light to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, kw_only=True)
class SpareWorker:
    """A warm process on a standby."""

    worker: str
    pid: int | None = None


@dataclass(frozen=True, kw_only=True)
class StandbyAgent:
    """An agent without ranks in an attempt."""

    agent: str
    node_id: str = ""
    host: str = ""
    workers: tuple[SpareWorker, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FoundState:
    """A saved state that was found when an attempt formed."""

    tier: str
    step: int
    attempt: int = 0
    mesh: str = ""
    complete: bool = True
    missing: Annotated[
        tuple[tuple[int, ...], ...],
        Field(
            description="ranks without a copy; ranks of which one copy would be enough are grouped"
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class JoinTimes:
    """The seconds that a rank spent in each phase of joining an attempt."""

    phases_s: Mapping[str, float] = field(default_factory=dict)
