"""Which step the ranks of a program have in common, and which one a save must leave. Pure.

A commit is one rank's; a step can be restored when every rank has committed it. So what a save must
leave, and what is newest, is decided from what all ranks have, and is the same on every rank. A
rank writes to the slot that does not hold the step to keep: whichever rank fails at whichever
moment, the last step that was whole stays on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from holdfast_workers.errors import WorkersError


class StepsDiffer(WorkersError):
    """Ranks that save or load together name different steps."""


@dataclass(frozen=True, order=True)
class WorldSave:
    """One save of all ranks; later ones are greater. A step may be saved more than once."""

    attempt: int
    number: int
    """Number of the save in its attempt, the same on all ranks."""
    step: int


@dataclass(frozen=True)
class Standing:
    """The saves that one rank has when it begins a save of `step`."""

    step: int
    complete: frozenset[WorldSave]
    """The complete saves in the rank's own slots: of this attempt, and the one that the attempt
    starts from."""
    goes_on_from: WorldSave | None = None
    """The save that the rank's program saved or loaded last in this attempt."""
    has_former: bool = False
    """A slot holds a save from before that which the attempt starts from."""
    at_partners: frozenset[WorldSave] = frozenset()
    """The saves of `complete` that all partners of the rank hold; without partners, all."""
    has_partner: bool = False
    last_number: int = 0


@dataclass(frozen=True)
class SaveDecision:
    """A decision about a save, the same for all ranks."""

    save: WorldSave
    keep: WorldSave | None
    """The newest save that every rank has: no rank touches its slot. None: there is none."""
    go: bool
    """Whether the save is made; False if it is skipped."""
    late: tuple[int, ...] = ()
    """The ranks whose partners do not hold `keep`. If any are, no older step is overwritten: it
    would be the only one left if a node were lost now."""
    protected: int = -1
    """A step that the partners of every rank hold; -1: not known."""


def decide(standings: Sequence[Standing], attempt: int, world_size: int) -> SaveDecision:
    """The decision about a save; `standings[rank]`. Of less than the whole world the ranks cannot
    know what the others decide, and go on. Raises StepsDiffer."""
    check_same_step([standing.step for standing in standings], "saved")
    number = 1 + max(standing.last_number for standing in standings)
    save = WorldSave(attempt, number, standings[0].step)
    keep = newest_whole(standings)
    if keep is None:
        return SaveDecision(save, keep, go=True)
    late = tuple(
        rank for rank, standing in enumerate(standings) if keep not in standing.at_partners
    )
    overwrites_older = any(
        standing.has_former or min(standing.complete) < keep for standing in standings
    )
    is_alone = len(standings) < world_size or world_size == 1
    is_protected = not late and all(standing.has_partner for standing in standings)
    return SaveDecision(
        save,
        keep,
        go=not (late and overwrites_older) or is_alone,
        late=late,
        protected=keep.step if is_protected else -1,
    )


def newest_whole(standings: Sequence[Standing]) -> WorldSave | None:
    """The save that the program goes on from if it is whole, else the newest that is."""
    whole = frozenset.intersection(*(standing.complete for standing in standings))
    bases = {standing.goes_on_from for standing in standings}
    return (
        next(iter(bases & whole))
        if len(bases & whole) == 1 == len(bases)
        else max(whole, default=None)
    )


def save_to_load(
    at_hand: Sequence[Mapping[int, Set[WorldSave]]], attempt: int, world_size: int
) -> WorldSave | None:
    """The save to load of those of one step: the newest that is whole. The save that `attempt`
    starts from is whole, whatever the size of the world that made it.

    `at_hand[rank][owner]`: the saves of `owner` that a rank has. If these are not those of all
    ranks, or none is whole, it is the save with most of its parts.
    """
    owners: dict[WorldSave, set[int]] = {}
    for of_rank in at_hand:
        for owner, saves in of_rank.items():
            for save in saves:
                owners.setdefault(save, set()).add(owner)
    whole = [
        save
        for save, of_save in owners.items()
        if len(at_hand) == world_size and (save.attempt != attempt or len(of_save) == world_size)
    ]
    if whole:
        return max(whole, key=lambda save: (save.attempt, len(owners[save]), save))
    return max(owners, key=lambda save: (len(owners[save]), save), default=None)


def check_same_step(steps: Sequence[int], done: str) -> None:
    """Raises StepsDiffer unless all ranks name the same step."""
    if len(set(steps)) > 1:
        named = ", ".join(f"{step} by rank {rank}" for rank, step in enumerate(steps))
        raise StepsDiffer(
            f"different steps are to be {done} together: {named}. All ranks must name the same one"
        )
