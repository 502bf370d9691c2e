"""Silent corruption: from what ranks found to who computed other bits. Pure.

A rank whose parameters changed by themselves has told it of itself. Of three replicas or more, the
odd ones are named by majority. Of two that differ nobody can be named at once: the step is
computed again, from the last state in which they agreed, and whoever has other bits than the first
time was wrong once. If both compute what they had, one of them is always wrong: a referee, another
node, computes the suspect's share, and the one that it does not agree with is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast_workers.state.replicas import ReplicaFinding


@dataclass(frozen=True)
class Seated:
    """Who had a rank when something was found."""

    agent: str
    worker: str | None = None


@dataclass(frozen=True)
class Evidence:
    """What was found in one attempt. `refereed`: the rank that another node computed than in the
    attempt before."""

    finding: ReplicaFinding
    seats: Mapping[int, Seated] = field(default_factory=dict)
    refereed: int | None = None


@dataclass(frozen=True)
class Verdict:
    """`ranks` computed other bits, in the attempt of `at`; none is named if that is empty. Then
    `referee` is the rank that another node is to compute next, if one is needed."""

    why: str
    ranks: tuple[int, ...] = ()
    at: Evidence | None = None
    referee: int | None = None


def judge(now: Evidence, before: Evidence | None = None) -> Verdict:
    """On what was just found. `before`: the evidence on the same history that named nobody."""
    finding = now.finding
    if finding.changed:
        return Verdict("its parameters changed between two steps", finding.changed, now)
    odd = _outvoted(finding)
    if odd:
        return Verdict("it differs from most of its replicas", odd, now)
    again = before is not None and before.finding.step == finding.step
    if before is None or not again:
        return Verdict("two replicas differ, and nobody is known to be wrong: the step is repeated")
    return _twice(now, before)


def after_repeat(before: Evidence, digests: Sequence[str]) -> Verdict:
    """The step was computed again, and the replicas agree: `digests` of all ranks, by rank."""
    moved = tuple(
        rank
        for ranks in before.finding.groups
        for rank in _moved(ranks, before.finding.digests, digests)
    )
    if not moved or any(set(ranks) <= set(moved) for ranks in before.finding.groups):
        return Verdict("the step was repeated, and all replicas have other bits than before")
    return Verdict("the step was repeated, and only it had other bits before", moved, before)


def _outvoted(finding: ReplicaFinding) -> tuple[int, ...]:
    """Ranks against which more than half of their replicas agree; none if a group is undecided."""
    odd: list[int] = []
    for ranks in finding.groups:
        digest, votes = Counter(finding.digests[rank] for rank in ranks).most_common(1)[0]
        if votes * 2 <= len(ranks):
            return ()
        odd += [rank for rank in ranks if finding.digests[rank] != digest]
    return tuple(odd)


def _twice(now: Evidence, before: Evidence) -> Verdict:
    """The same step differs again."""
    finding, known = now.finding, before.finding.digests
    for ranks in finding.groups:
        moved = _moved(ranks, known, finding.digests)
        if now.refereed in ranks and now.refereed not in moved:
            others = tuple(rank for rank in ranks if rank != now.refereed)
            return Verdict("another node computed what its replica has", others, now)
        if moved and len(moved) < len(ranks):
            return Verdict("it computed the same step with other bits each time", moved, now)
    suspect = max(rank for ranks in finding.groups for rank in ranks)
    return Verdict(
        f"the replicas differ each time: another node is to compute rank {suspect}",
        referee=suspect,
    )


def _moved(
    ranks: Sequence[int], before: Mapping[int, str], now: Mapping[int, str] | Sequence[str]
) -> tuple[int, ...]:
    """Those of `ranks` that were known, and have other bits than before."""
    return tuple(rank for rank in ranks if rank in before and now[rank] != before[rank])
