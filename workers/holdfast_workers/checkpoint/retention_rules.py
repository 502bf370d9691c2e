"""Decides which checkpoints of the remote tier a spec's rules remove, and for what reason. Pure.

Never removed, independent of the rules: pinned checkpoints, checkpoints that another job starts
from, the newest checkpoint that verifies, and folders that the current attempt or a later one may
still be writing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from holdfast_workers.spec import KeepBestSpec, RemoteTierSpec


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint's folder: the facts that retention depends on."""

    step: int
    attempt: int
    complete: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of its step, from the manifest."""
    pinned: bool = False
    needed: bool = False
    """Another job starts from it and has saved nothing of its own yet."""

    @property
    def age(self) -> tuple[int, int]:
        """Sort key; the newest checkpoint has the greatest."""
        return (self.step, self.attempt)


@dataclass(frozen=True)
class CheckpointRemoval:
    checkpoint: StoredCheckpoint
    reason: str


def checkpoints_to_remove(
    stored: Collection[StoredCheckpoint],
    rules: RemoteTierSpec,
    *,
    current_attempt: int,
    is_whole: Callable[[StoredCheckpoint], bool],
) -> list[CheckpointRemoval]:
    """The removals among `stored`, newest first.

    `is_whole` reads a checkpoint in full, which is slow. It is called only if a complete
    checkpoint would be removed, newest first, until it finds a whole one.
    """
    ordered = sorted(stored, key=lambda checkpoint: checkpoint.age, reverse=True)
    complete = [checkpoint for checkpoint in ordered if checkpoint.complete]
    surplus = _surplus(complete, rules)
    if surplus:
        spared = next((checkpoint for checkpoint in complete if is_whole(checkpoint)), None)
        surplus = [checkpoint for checkpoint in surplus if checkpoint is not spared]
    reason = _surplus_reason(rules)
    removals = [CheckpointRemoval(checkpoint, reason) for checkpoint in surplus]
    if complete:
        removals += [
            CheckpointRemoval(checkpoint, f"attempt {checkpoint.attempt} left it incomplete")
            for checkpoint in ordered
            if not checkpoint.complete
            and checkpoint.age < complete[0].age
            and checkpoint.attempt < current_attempt
        ]
    return removals


def best_checkpoints(
    stored: Collection[StoredCheckpoint], rule: KeepBestSpec
) -> list[StoredCheckpoint]:
    """The best `n` by the rule's metric; the newer of equals. A checkpoint without a finite value
    of the metric is never among them."""
    sign = 1.0 if rule.mode == "min" else -1.0
    measured = [
        checkpoint
        for checkpoint in stored
        if checkpoint.complete and math.isfinite(checkpoint.metrics.get(rule.metric, math.nan))
    ]
    newest_first = sorted(measured, key=lambda checkpoint: checkpoint.age, reverse=True)
    ranked = sorted(newest_first, key=lambda checkpoint: sign * checkpoint.metrics[rule.metric])
    return ranked[: rule.n]


def _surplus(complete: list[StoredCheckpoint], rules: RemoteTierSpec) -> list[StoredCheckpoint]:
    """The complete checkpoints that no rule keeps, newest first."""
    kept = {checkpoint.age for checkpoint in complete[: rules.keep]}
    if rules.keep_every is not None:
        kept |= {
            checkpoint.age for checkpoint in complete if checkpoint.step % rules.keep_every == 0
        }
    if rules.keep_best is not None:
        kept |= {checkpoint.age for checkpoint in best_checkpoints(complete, rules.keep_best)}
    return [
        checkpoint
        for checkpoint in complete
        if not (checkpoint.age in kept or checkpoint.pinned or checkpoint.needed)
    ]


def _surplus_reason(rules: RemoteTierSpec) -> str:
    parts = [f"not among the newest {rules.keep}"]
    if rules.keep_every is not None:
        parts.append(f"no multiple of {rules.keep_every}")
    if rules.keep_best is not None:
        parts.append(f"not among the best {rules.keep_best.n} by {rules.keep_best.metric}")
    return ", ".join(parts)
