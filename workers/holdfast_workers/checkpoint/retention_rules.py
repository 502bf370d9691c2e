"""Which checkpoints of the remote tier stay, and which go and why: the rules of a spec. Pure.

Never doomed, whatever the rules say: what is pinned, what another job was told to start from, the
newest that verifies, and what the current attempt, or a later one, may still be writing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from holdfast_workers.spec import KeepBestSpec, RemoteTierSpec


@dataclass(frozen=True)
class Stored:
    """One checkpoint's folder, as far as retention cares."""

    step: int
    attempt: int
    complete: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the row of its step said, as its manifest tells."""
    pinned: bool = False
    needed: bool = False
    """Another job was told to start from it and has saved nothing of its own yet."""

    @property
    def age(self) -> tuple[int, int]:
        """Orders checkpoints: the newest has the greatest."""
        return (self.step, self.attempt)


@dataclass(frozen=True)
class Doomed:
    stored: Stored
    why: str


def doomed(
    found: Collection[Stored],
    rules: RemoteTierSpec,
    *,
    current_attempt: int,
    is_whole: Callable[[Stored], bool],
) -> list[Doomed]:
    """Those of `found` that go, newest first.

    `is_whole` reads a checkpoint through, which takes its time: it is asked only if a complete
    one is to go, of the newest first, until one is whole.
    """
    ordered = sorted(found, key=lambda one: one.age, reverse=True)
    complete = [one for one in ordered if one.complete]
    surplus = _surplus(complete, rules)
    if surplus:
        spared = next((one for one in complete if is_whole(one)), None)
        surplus = [one for one in surplus if one is not spared]
    why = _why(rules)
    going = [Doomed(one, why) for one in surplus]
    if complete:
        going += [
            Doomed(one, f"attempt {one.attempt} left it incomplete")
            for one in ordered
            if not one.complete and one.age < complete[0].age and one.attempt < current_attempt
        ]
    return going


def best(found: Collection[Stored], rule: KeepBestSpec) -> list[Stored]:
    """The best `n` by the rule's metric; of equals the newer. What has no finite value is none."""
    sign = 1.0 if rule.mode == "min" else -1.0
    measured = [
        one
        for one in found
        if one.complete and math.isfinite(one.metrics.get(rule.metric, math.nan))
    ]
    newest_first = sorted(measured, key=lambda one: one.age, reverse=True)
    return sorted(newest_first, key=lambda one: sign * one.metrics[rule.metric])[: rule.n]


def _surplus(complete: list[Stored], rules: RemoteTierSpec) -> list[Stored]:
    """What no rule keeps, of complete ones, newest first."""
    kept = {one.age for one in complete[: rules.keep]}
    if rules.keep_every is not None:
        kept |= {one.age for one in complete if one.step % rules.keep_every == 0}
    if rules.keep_best is not None:
        kept |= {one.age for one in best(complete, rules.keep_best)}
    return [one for one in complete if not (one.age in kept or one.pinned or one.needed)]


def _why(rules: RemoteTierSpec) -> str:
    words = [f"not among the newest {rules.keep}"]
    if rules.keep_every is not None:
        words.append(f"no multiple of {rules.keep_every}")
    if rules.keep_best is not None:
        words.append(f"not among the best {rules.keep_best.n} by {rules.keep_best.metric}")
    return ", ".join(words)
