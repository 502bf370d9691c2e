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

    def is_due(
        self, step: int, every: int, *, saving: bool, last: bool, makes_up: bool = True
    ) -> bool:
        """Whether to save `step`. `every`: steps between two saves, 0 for none but the `last`;
        `saving`: whether an earlier save of any rank is under way; `makes_up`: whether this step
        may be saved in place of an earlier one. The last step never waits."""
        is_its_turn = every > 0 and step % every == 0
        owed = every > 0 and (is_its_turn or self._overdue)
        wanted = owed and (is_its_turn or makes_up)
        saved = wanted and not saving
        self._overdue = owed and not saved
        return last or saved
