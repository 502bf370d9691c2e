"""What the memory checkpoints of a placement protect against. Light to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True)
class Odds:
    """A probability."""

    probability: float
    standard_error: Annotated[float, Field(description="0: exact")]


@dataclass(frozen=True)
class MemoryProtection:
    """The failures that memory checkpoints survive, given the present partners."""

    copies: Annotated[int, Field(description="copies of each state on other nodes, at least")]
    partners: Annotated[
        Mapping[int, tuple[str, ...]],
        Field(
            description="rank -> agents that hold its copies; empty where replicas replace copies"
        ),
    ]
    recoverable: Annotated[
        Mapping[int, Odds],
        Field(
            description="k -> probability that training continues from memory when k of the nodes "
            "that hold state are lost at once"
        ),
    ]
    unprotected: Annotated[
        tuple[str, ...],
        Field(
            description="groups, domains and nodes whose loss would lose state although more nodes "
            "or another setting could protect it, with the reason"
        ),
    ]
