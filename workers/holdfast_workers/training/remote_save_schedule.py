"""When the ranks of an attempt save to the remote tier. Pure, and equal on every rank.

A checkpoint is complete only if every rank saves the same step. While any rank is still saving, no
rank starts another save: a save that is due meanwhile is made up for after the first step at which
no rank is saving. Without this, ranks whose savers differ in speed would save different steps, and
a remote tier that is slower than the interval would never hold a complete checkpoint.
"""

from __future__ import annotations


class RemoteSaveSchedule:
    """Ask once for every step of an attempt, in order, with values that all ranks agreed on."""

    def __init__(self) -> None:
        self._overdue = False

    def is_due(self, step: int, every: int, *, saving: bool, last: bool) -> bool:
        """Whether to save `step`. `every`: steps between two saves, 0 for none but the `last`;
        `saving`: whether an earlier save of any rank is under way. The last step never waits."""
        wanted = every > 0 and (step % every == 0 or self._overdue)
        self._overdue = wanted and saving
        return last or (wanted and not saving)
