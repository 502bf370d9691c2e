"""Chooses pairs of nodes for test exchanges, and finds bad nodes from the results. Pure.

A failed exchange proves only that one of the two nodes is bad. So a second round pairs each node
that failed with a node that succeeded: if it fails again it is bad, otherwise its first partner
was. If no exchange succeeds, the culprit is unknown and no node is accused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

Pair = tuple[str, str]


def first_round(new: Sequence[str], known: Sequence[str]) -> list[Pair]:
    """Pairs each new node once with another new node, or with a known node; without one, some node
    is used twice."""
    agents = sorted(new)
    pairs = list(zip(agents[::2], agents[1::2], strict=False))
    if len(agents) % 2:
        others = [*sorted(known), *agents[:-1]]
        pairs += [(agents[-1], others[0])] if others else []
    return pairs


def second_round(results: Mapping[Pair, bool], known: Sequence[str]) -> list[Pair]:
    """Pairs each node that failed with a node that succeeded, in turn; without such nodes, with
    nodes that were not tested; without those too, failed nodes with each other in new pairs."""
    tried = {agent for pair in results for agent in pair}
    sound = sorted(_sound(results)) or sorted(set(known) - tried)
    suspects = sorted(tried - set(sound))
    if sound:
        return [(agent, sound[index % len(sound)]) for index, agent in enumerate(suspects)]
    if len(suspects) < 3:
        return []
    rotated = zip(suspects, [*suspects[2:], *suspects[:2]], strict=True)
    before = {frozenset(pair) for pair in results}
    return [pair for pair in rotated if frozenset(pair) not in before]


def culprits(results: Mapping[Pair, bool]) -> set[str]:
    """Nodes that never succeeded, and failed with a partner that succeeded with another node."""
    sound = _sound(results)
    failed = [pair for pair, succeeded in results.items() if not succeeded]
    return {
        agent
        for left, right in failed
        for agent, partner in ((left, right), (right, left))
        if partner in sound and agent not in sound
    }


def _sound(results: Mapping[Pair, bool]) -> Collection[str]:
    return {agent for pair, succeeded in results.items() if succeeded for agent in pair}
