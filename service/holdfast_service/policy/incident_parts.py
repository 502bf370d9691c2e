"""The parts of an incident, as its record in the store and the API have them. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, kw_only=True)
class LostItem:
    """A process or node that was lost to a fault. `cause`: see the incident's `cause`."""

    cause: str = ""
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    worker: str | None = None
    agent: str | None = None
    attempt: int | None = None
    on_notice: Annotated[
        bool, Field(description="the cluster had announced that it would remove the node")
    ] = False


@dataclass(frozen=True, kw_only=True)
class RefusedDecision:
    """A decision that was not taken, and the reason."""

    decision: str
    why: str


@dataclass(frozen=True, kw_only=True)
class EarlierRecovery:
    """A recovery within the incident that a further fault cut short."""

    attempt: int
    """The attempt that had failed."""
    cause: str
    """The root cause of that failure."""
    decision: str
    reason: str = ""
    next_attempt: int = 0
    """The attempt that was to follow, and failed too; the last of them, if several failed for want
    of data, one after the other."""


@dataclass(frozen=True)
class SuspectedRank:
    """A rank that may have caused a hang, and its place: recovery replaces workers and nodes, not
    ranks."""

    rank: int
    score: Annotated[float, Field(description="strength of the evidence, up to 1")]
    reasons: tuple[str, ...] = ()
    agent: str = ""
    node_id: str = ""
    worker: str | None = None


@dataclass(frozen=True)
class SharedStack:
    """A call stack of all these ranks."""

    ranks: tuple[int, ...]
    frames: Annotated[tuple[str, ...], Field(description="innermost first")]
