"""Silent corruption: names the rank that computed wrong bits, from the ranks' findings. Pure.

A rank whose parameters change without a step reports itself. Of three or more replicas, a majority
names the odd ranks. Two replicas that differ name no culprit at once: the step is computed again
from the last state in which they agreed, and a rank whose bits differ from its first result was
wrong once. If both repeat their results, one of them is always wrong: a referee, another node,
computes the suspect's part, and the rank that it disagrees with is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast_workers.protocol.findings import ReplicaFinding


@dataclass(frozen=True)
class RankHolder:
    """The agent and worker that had a rank at the time of a finding."""

    agent: str
    worker: str | None = None


@dataclass(frozen=True)
class Evidence:
    """The finding of one attempt. `refereed`: the rank that was on another node in the attempt
    before."""

    finding: ReplicaFinding
    seats: Mapping[int, RankHolder] = field(default_factory=dict)
    refereed: int | None = None


@dataclass(frozen=True)
class CorruptionVerdict:
    """`ranks` computed wrong bits, in the attempt of `evidence`. If it is empty, no rank is named;
    then `referee` is the rank that another node must compute next, if one is needed."""

    why: str
    ranks: tuple[int, ...] = ()
    evidence: Evidence | None = None
    referee: int | None = None


def judge_corruption(
    now: Evidence, before: Evidence | None = None, *, repeatable: bool = True
) -> CorruptionVerdict:
    """The verdict on new evidence. `before`: earlier evidence that named no rank, if any.
    `repeatable`: whether a step that is computed again has the same bits; otherwise digests accuse
    nobody, and only what changed between two steps does."""
    finding = now.finding
    if finding.changed:
        return CorruptionVerdict("its parameters changed between two steps", finding.changed, now)
    if not repeatable:
        return CorruptionVerdict(
            "replicas differ, and no rank is named: train.deterministic is fast, so healthy ranks "
            "may differ too"
        )
    odd = _outvoted(finding)
    if odd:
        return CorruptionVerdict("it differs from most of its replicas", odd, now)
    again = before is not None and before.finding.step == finding.step
    if before is None or not again:
        return CorruptionVerdict(
            "two replicas differ, and the wrong rank is unknown: the step is repeated"
        )
    return _judge_repeated(now, before)


def after_repeat(
    before: Evidence, digests: Sequence[str], *, repeatable: bool = True
) -> CorruptionVerdict:
    """The verdict after the step was repeated and the replicas agree. `digests`: of all ranks.
    `repeatable`: as in `judge_corruption`."""
    if not repeatable:
        return CorruptionVerdict("the step was repeated, which proves nothing in fast mode")
    changed = tuple(
        rank
        for ranks in before.finding.groups
        for rank in _changed_ranks(ranks, before.finding.digests, digests)
    )
    if not changed or any(set(ranks) <= set(changed) for ranks in before.finding.groups):
        return CorruptionVerdict(
            "the step was repeated, and all replicas have other bits than before"
        )
    return CorruptionVerdict(
        "the step was repeated, and only it had other bits before", changed, before
    )


def _outvoted(finding: ReplicaFinding) -> tuple[int, ...]:
    """Ranks that differ from the majority of their replicas; none if a group has no majority."""
    odd: list[int] = []
    for ranks in finding.groups:
        digest, votes = Counter(finding.digests[rank] for rank in ranks).most_common(1)[0]
        if votes * 2 <= len(ranks):
            return ()
        odd += [rank for rank in ranks if finding.digests[rank] != digest]
    return tuple(odd)


def _judge_repeated(now: Evidence, before: Evidence) -> CorruptionVerdict:
    """The verdict if the replicas differ at the same step again."""
    finding, known = now.finding, before.finding.digests
    for ranks in finding.groups:
        changed = _changed_ranks(ranks, known, finding.digests)
        if now.refereed in ranks and now.refereed not in changed:
            others = tuple(rank for rank in ranks if rank != now.refereed)
            return CorruptionVerdict("another node computed what its replica has", others, now)
        if changed and len(changed) < len(ranks):
            return CorruptionVerdict(
                "it computed the same step with other bits each time", changed, now
            )
    suspect = max(rank for ranks in finding.groups for rank in ranks)
    return CorruptionVerdict(
        f"the replicas differ each time: another node must compute rank {suspect}",
        referee=suspect,
    )


def _changed_ranks(
    ranks: Sequence[int], before: Mapping[int, str], now: Mapping[int, str] | Sequence[str]
) -> tuple[int, ...]:
    """The ranks whose digest was known and differs from before."""
    return tuple(rank for rank in ranks if rank in before and now[rank] != before[rank])
