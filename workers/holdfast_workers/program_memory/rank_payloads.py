"""This rank's memory checkpoints: when it may save, what it has of a step, what is newest.

Collectives are made here and by the callers that say so, in the training thread; what the ranks
decide is computed in `world_saves.py`, from what all of them have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import structlog
import torch.distributed as dist

from holdfast_workers.errors import WorkersError
from holdfast_workers.memory.segment import Commit
from holdfast_workers.program_memory.found_payloads import (
    PayloadDamaged,
    Payloads,
    find_payloads,
    save_of,
)
from holdfast_workers.program_memory.gloo_groups import GlooGroups
from holdfast_workers.program_memory.own_segment import OwnSegment
from holdfast_workers.program_memory.payload import PayloadIndex, PayloadWriter, needed_bytes
from holdfast_workers.program_memory.payload_exchange import StateMissing
from holdfast_workers.program_memory.world_saves import (
    SaveDecision,
    Standing,
    WorldSave,
    check_same_step,
    decide,
    newest_whole,
    save_to_load,
)
from holdfast_workers.programs.attachment import Attachment
from holdfast_workers.protocol.messages import Tier
from holdfast_workers.protocol.programs import ProgramPlace

LEAVE_WAIT_S = 5.0
"""How long the save of a program that is asked to stop waits for the partners: its node may go."""
_OF_THIS_WORLD = (Tier.OWN_RAM, Tier.PARTNER_RAM)
_log = structlog.get_logger()


class PeerFailed(WorkersError):
    """Another rank has raised the error that the message names."""


class SavedOtherwise(WorkersError):
    """The step is in memory, saved by another call than that which loads it."""


class WrongWorld(WorkersError):
    """Not all ranks of the program take part."""


@dataclass(frozen=True)
class LocatedStep:
    """A save to load, the same on all ranks."""

    save: WorldSave | None
    """The save that is loaded; None if no rank has a payload of the step."""
    at_hand: Payloads
    """The payloads of this save on this rank."""
    owners: list[list[int]]
    """The owners of the payloads that each rank has at hand; of this rank alone, if the ranks
    cannot talk to each other."""


class RankPayloads:
    """The payloads of this process's rank. `timeout_s` bounds the arrival of the state and every
    exchange; `replication_wait_s` the wait of a save for the partners' copies of the last one."""

    def __init__(
        self,
        attachment: Attachment,
        groups: GlooGroups,
        timeout_s: float,
        replication_wait_s: float,
    ) -> None:
        assert attachment.place is not None
        self.place: ProgramPlace = attachment.place
        self._attachment = attachment
        self._timeout_s = timeout_s
        self._replication_wait_s = replication_wait_s
        self._path = Path(self.place.segment_path)
        self._own = OwnSegment(self._path, self.place.attempt)
        self._writing = Lock()
        self._writer: PayloadWriter | None = None
        self._last_number = 0
        self._goes_on_from: WorldSave | None = None
        self._known: dict[Commit, WorldSave] = {}
        self._was_used = False
        self._arrived = False
        self._fits = True
        """Whether the state that the attempt starts from can be divided among its ranks."""
        self._found: tuple[int, Payloads] | None = None
        self._groups = groups

    # --- the ranks ------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether the ranks can talk to each other. Raises WrongWorld if these are not all."""
        if not (dist.is_available() and dist.is_initialized()):
            return False
        size = dist.get_world_size()
        if size != self.place.world_size:
            raise WrongWorld(
                f"torch.distributed was initialized with {size} ranks, the job has "
                f"{self.place.world_size}: memory checkpoints need all of them"
            )
        return size > 1

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, by rank; all ranks call it."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(values, value, self.exchange_group)
        return values

    @property
    def exchange_group(self) -> dist.ProcessGroup:
        """The group of the exchanges that the training thread makes."""
        return self._groups.get("exchange")

    # --- saving ---------------------------------------------------------------------------------

    def use(self) -> None:
        """The program saves or loads from now on: `newest` asks all ranks. Called by the thread
        that trains."""
        self._was_used = True

    def standing(self, step: int) -> Standing:
        """The saves that this rank has when it begins a save of `step`. Waits for the partners if
        they must hold the last one."""
        standing = self._standing(step)
        digests = {save: commit.digest for commit, save in self._known.items()}  # as it was found
        newest = max(standing.complete, default=None)
        if newest is not None and (standing.has_former or len(standing.complete) > 1):
            last = self._attachment.should_stop
            wait_s = max(self._replication_wait_s, LEAVE_WAIT_S if last else 0.0)
            self._attachment.is_replicated(newest.step, digests[newest], wait_s)
        at_partners = (
            save
            for save in standing.complete
            if self._attachment.is_replicated(save.step, digests[save])
        )
        has_partner = self._attachment.has_partner
        return replace(standing, at_partners=frozenset(at_partners), has_partner=has_partner)

    def agree(self, step: int) -> SaveDecision:
        """The ranks' decision about a save of `step`; all ranks call it. Raises StepsDiffer."""
        self.use()
        standings = self.gather(self.standing(step))
        decision = decide(standings, self.place.attempt, self.place.world_size)
        self.follow(decision)
        return decision

    def follow(self, decision: SaveDecision) -> None:
        """Note a decision that was made by all ranks, or for them."""
        self._last_number = max(self._last_number, decision.save.number)
        if decision.go or decision.keep is None or self.place.rank not in decision.late:
            return
        _log.warning(
            "a memory checkpoint is skipped: its partners do not hold the last one yet",
            step=decision.save.step,
            last=decision.keep.step,
            waited_s=self._replication_wait_s,
        )
        self._report(decision.keep)  # new partners may have been offered another one

    def begin(self, decision: SaveDecision, parts: list[int], index: PayloadIndex) -> PayloadWriter:
        """A writer with room for parts of these sizes and `index`, which names them. The former
        writer is void. Raises SegmentSpaceError."""
        with self._writing:
            self._writer = None
            slot = self._slot(decision, needed_bytes(parts, index))
            self._writer = PayloadWriter(slot)
            return self._writer

    @contextmanager
    def finishing(self, writer: PayloadWriter) -> Iterator[None]:
        """Excludes other saves while `writer` writes. Raises WorkersError if one began since."""
        with self._writing:
            if self._writer is not writer:
                raise WorkersError(
                    "another memory checkpoint was begun before this one was complete: wait for "
                    "the result of async_save before the next save"
                )
            yield

    def enlarge(self, writer: PayloadWriter, decision: SaveDecision, nbytes: int) -> None:
        """Give the unfinished payload `nbytes` of room; within `finishing`."""
        writer.move_to(self._slot(decision, nbytes))

    def commit(self, writer: PayloadWriter, decision: SaveDecision, index: PayloadIndex) -> None:
        """Declare the payload complete, and report it; within `finishing`."""
        step = decision.save.step
        commit = self._own.commit(step, writer.finish(index))
        self._writer, self._found = None, None
        self._goes_on_from = decision.save
        self._report(decision.save, decision.protected)
        if self._attachment.should_stop:
            self._attachment.is_replicated(step, commit.digest, LEAVE_WAIT_S)

    def _slot(self, decision: SaveDecision, nbytes: int) -> memoryview:
        kept = (commit for commit, save in self._own_saves().items() if save == decision.keep)
        return self._own.begin(decision.save.step, nbytes, next(kept, None))

    def _standing(self, step: int) -> Standing:
        saves = self._own_saves().values()
        starts = set(filter(self._is_start, saves))
        made = {save for save in saves if save.attempt == self.place.attempt}
        return Standing(
            step,
            frozenset(starts | made),
            self._goes_on_from,
            has_former=bool(starts) and min(saves) < min(starts),
            # Of this object, and of another one that the program has made.
            last_number=max([self._last_number, *(save.number for save in made)]),
        )

    def _is_start(self, save: WorldSave) -> bool:
        """Whether the attempt starts from `save`."""
        restore = self.place.restore
        # A damaged payload has the number 0: it is refused when it is verified.
        is_same = restore.number is None or save.number in (0, restore.number)
        return is_same and (save.attempt, save.step) == (restore.attempt, restore.step)

    def _own_saves(self) -> dict[Commit, WorldSave]:
        """The saves in this rank's segment, of any attempt."""
        segment = self._own.current()
        commits = segment.commits() if segment is not None else []
        self._known = {
            commit: self._known.get(commit) or save_of(segment, commit)
            for commit in commits
            if segment is not None
        }
        return self._known

    # --- restoring ------------------------------------------------------------------------------

    def newest(self) -> int | None:
        """The step that can be loaded: the newest that every rank has, at first the one that the
        attempt starts from, once it has arrived and is verified. All ranks call it together once
        the program has saved or loaded. Raises StateMissing, PayloadDamaged."""
        if not self._was_used:
            return self._start()
        starts, standings = zip(
            *together(self, lambda: (self._start(), self._standing(0))), strict=True
        )
        newest = newest_whole(standings)
        start: int | None = starts[0] if len(set(starts)) == 1 else None
        return newest.step if newest is not None else start

    def locate(self, step: int) -> LocatedStep:
        """The save of `step` that the ranks load. All ranks call it. Raises StepsDiffer."""
        found = self._find(step)
        known = self.gather((step, found.saves))
        check_same_step([each for each, _ in known], "loaded")
        rank, world_size = self.place.rank, self.place.world_size
        at_hand = [saves for _, saves in known]
        if len(at_hand) < world_size and rank in found.saves:  # nothing is known of the others
            at_hand = [{rank: found.saves[rank]}]
        save = save_to_load(at_hand, self.place.attempt, world_size)
        owners = [
            sorted(owner for owner, of_owner in saves.items() if save in of_owner)
            for _, saves in known
        ]
        return LocatedStep(save, found.of(save), owners)

    def taken(self, save: WorldSave | None) -> None:
        """The program goes on from `save`, which it has loaded."""
        own = self._own.current()
        for commit, of_commit in self._own_saves().items():
            if own is not None and of_commit == save:
                own.make_newest(commit)
        self._goes_on_from, self._found = save, None  # of other ranks nothing stays mapped
        if save is not None and save.attempt != self.place.attempt:
            self._report(save)

    def _report(self, save: WorldSave, protected: int = -1) -> None:
        """This rank has `save`, so that the agent offers it to the partners."""
        if save.attempt == self.place.attempt:
            self._attachment.report_saved(save.step, protected)
        else:
            self._attachment.report_taken(save.step)

    def _start(self) -> int | None:
        """The step that the attempt starts from, once it has arrived and is verified; None: there
        is none."""
        restore = self.place.restore
        if restore.tier not in (*_OF_THIS_WORLD, Tier.RESHARD):
            return None
        if not self._arrived:
            reply = self._attachment.wait_state(self._timeout_s)
            if reply.problem:
                error = PayloadDamaged if reply.damaged else StateMissing
                raise error(f"step {restore.step} cannot be restored from memory: {reply.problem}")
            found = self._find(restore.step)
            if restore.tier is Tier.RESHARD:
                index = found.any_index()
                self._fits = index is not None and index.divisible
            elif self.place.rank in found.owners:
                found.view(self.place.rank)
            self._arrived = True
        return restore.step if self._fits else None

    def _find(self, step: int) -> Payloads:
        """The payloads of `step` at hand: of this attempt, or of the save that it starts from."""
        if self._found is not None and self._found[0] == step and self._found[1].are_current():
            return self._found[1]  # verified already

        def is_wanted(save: WorldSave) -> bool:
            is_own = save.attempt == self.place.attempt
            return save.step == step and (is_own or self._is_start(save))

        own = self._own.current()
        found = find_payloads(self._path.parents[1], self.place.rank, own, is_wanted)
        self._found = step, found
        return found


def together(payloads: RankPayloads, act: Callable[[], Any]) -> list[Any]:
    """The result of `act` on every rank, by rank; all ranks call it. If it fails on one, every
    rank raises, and none waits for it in vain."""
    try:
        outcome = act()
    except Exception as error:
        failed = (
            str(error) if isinstance(error, WorkersError) else f"{type(error).__name__}: {error}"
        )
        payloads.gather((None, failed))
        raise
    outcomes = payloads.gather((outcome, None))
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            raise PeerFailed(f"rank {rank}: {failed}")
    return [each for each, _ in outcomes]
