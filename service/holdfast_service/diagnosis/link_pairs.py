"""Who exchanges bytes with whom, and what follows: pure.

One exchange that fails says only that one of two nodes is bad. So whoever failed is paired, in a
second round, with a node that did not: it is bad if it fails there too, and its partner was if not.
Where no exchange succeeds, nobody can tell, and nobody is accused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

Pair = tuple[str, str]


def first_round(new: Sequence[str], known: Sequence[str]) -> list[Pair]:
    """Every new node once, with another new one, or with one that was there before; some node
    twice where there is nobody else."""
    agents = sorted(new)
    pairs = list(zip(agents[::2], agents[1::2], strict=False))
    if len(agents) % 2:
        others = [*sorted(known), *agents[:-1]]
        pairs += [(agents[-1], others[0])] if others else []
    return pairs


def second_round(results: Mapping[Pair, bool], known: Sequence[str]) -> list[Pair]:
    """Whoever failed, with those who did not in turn; if nobody did not, with those who had no
    part in the first round; with each other anew if everybody had."""
    tried = {agent for pair in results for agent in pair}
    sound = sorted(_sound(results)) or sorted(set(known) - tried)
    doubted = sorted(tried - set(sound))
    if sound:
        return [(agent, sound[index % len(sound)]) for index, agent in enumerate(doubted)]
    if len(doubted) < 3:
        return []
    turned = zip(doubted, [*doubted[2:], *doubted[:2]], strict=True)
    before = {frozenset(pair) for pair in results}
    return [pair for pair in turned if frozenset(pair) not in before]


def culprits(results: Mapping[Pair, bool]) -> set[str]:
    """Nodes that failed with a partner who did not fail with another, and never succeeded."""
    sound = _sound(results)
    failed = [pair for pair, well in results.items() if not well]
    return {
        agent
        for one, other in failed
        for agent, partner in ((one, other), (other, one))
        if partner in sound and agent not in sound
    }


def _sound(results: Mapping[Pair, bool]) -> Collection[str]:
    return {agent for pair, well in results.items() if well for agent in pair}
