"""One rank's memory checkpoints: written to its segment, found again, verified, and exchanged.

A step that a rank has committed is reported to the node agent, which copies it to the partners. It
can be restored once every rank has it. The slot of the last step that all partners hold is never
overwritten: a save that would do so is skipped, on all ranks or on none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import structlog
import torch.distributed as dist

from holdfast_workers.errors import WorkersError
from holdfast_workers.memory.segment import BadSegment, Commit, Segment
from holdfast_workers.program_memory.gloo_groups import GlooGroups
from holdfast_workers.program_memory.own_segment import OwnSegment
from holdfast_workers.program_memory.payload import (
    PayloadIndex,
    PayloadKind,
    PayloadWriter,
    needed_bytes,
    read_index,
)
from holdfast_workers.program_memory.payload_exchange import StateMissing
from holdfast_workers.programs.attachment import Attachment
from holdfast_workers.protocol.messages import Tier
from holdfast_workers.protocol.programs import ProgramPlace

LEAVE_WAIT_S = 5.0
"""How long the save of a program that is asked to stop waits for the partners: its node may go."""
_SEGMENT_FILE = re.compile(r"(?:own|replica)-(\d+)\.seg")
_log = structlog.get_logger()


class PayloadDamaged(WorkersError):
    """A memory checkpoint does not have its digest."""


class PeerFailed(WorkersError):
    """Another rank has raised the error that the message names."""


class SavedOtherwise(WorkersError):
    """The step is in memory, saved by another call than that which loads it."""


class WrongWorld(WorkersError):
    """Not all ranks of the program take part."""


@dataclass
class _AtHand:
    """A payload in this node's shared memory."""

    segment: Segment
    commit: Commit
    verified: bool = False


class Payloads:
    """The payloads of one step that this rank can read without others, by the rank that saved
    them."""

    def __init__(self, found: dict[int, _AtHand], own_rank: int) -> None:
        self._found = found
        self._own_rank = own_rank

    @property
    def owners(self) -> list[int]:
        return sorted(self._found)

    def view(self, owner: int) -> memoryview:
        """The bytes, verified at the first call. Raises StateMissing, PayloadDamaged."""
        at_hand = self._found.get(owner)
        if at_hand is None:
            raise StateMissing(f"the memory checkpoint of rank {owner} is not on this node")
        segment, commit = at_hand.segment, at_hand.commit
        if not at_hand.verified:
            if not segment.verify(commit):
                if segment.writable and segment.is_current(commit):
                    segment.quarantine(commit)
                raise PayloadDamaged(
                    f"step {commit.step} of rank {owner} in memory does not match its digest: "
                    "it must not be loaded"
                )
            at_hand.verified = True
        return segment.slot(commit)

    def index(self, owner: int) -> PayloadIndex:
        """Raises StateMissing, PayloadDamaged, BadPayload."""
        return read_index(self.view(owner))

    def any_index(self) -> PayloadIndex | None:
        """The index of this rank's own payload, or else of another at hand; None: there is none."""
        order = sorted(self._found, key=lambda owner: (owner != self._own_rank, owner))
        return self.index(order[0]) if order else None

    def is_current(self, attempt: int, step: int) -> bool:
        """Whether these are payloads of this step, none of which has been overwritten."""
        return bool(self._found) and all(
            (each.commit.attempt, each.commit.step) == (attempt, step)
            and each.segment.is_current(each.commit)
            for each in self._found.values()
        )

    def check_current(self) -> None:
        """Raises StateMissing if a payload that was read has been overwritten meanwhile."""
        for owner, at_hand in self._found.items():
            if at_hand.verified and not at_hand.segment.is_current(at_hand.commit):
                raise StateMissing(f"rank {owner} has overwritten step {at_hand.commit.step}")


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
        self._saved: int | None = None
        self._kept: int | None = None  # the step on which the program builds: saved, or taken
        self._arrived = False
        self._fits = True
        """Whether the state that the attempt starts from can be divided among its ranks."""
        self._protected = -1
        self._found: Payloads | None = None
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

    def is_ready(self, step: int) -> bool:
        """Whether this rank may save `step`: no step is lost by it that may be the only one left.
        Waits for the partners."""
        self._protected = -1
        segment = self._own.current()
        commits = segment.commits() if segment is not None else []
        newest = self._kept
        if newest is None:  # the program began anew: what its segment contains is abandoned
            return True
        if len(commits) < 2 or (step != newest and step in (each.step for each in commits)):
            return True
        last = self._attachment.should_stop
        wait_s = max(self._replication_wait_s, LEAVE_WAIT_S) if last else self._replication_wait_s
        held = self._attachment.wait_replicated(newest, wait_s)
        if held < newest:
            _log.warning(
                "a memory checkpoint is skipped: its partners do not hold the last one yet",
                step=step,
                last=newest,
                waited_s=wait_s,
            )
        if held >= newest and self._attachment.has_partner:
            self._protected = newest  # if all ranks save, it holds for all
        return held >= newest

    def all_ready(self, step: int) -> bool:
        """Whether every rank may save `step`; all ranks call it. Without torch.distributed a rank
        cannot know of the others, and goes on."""
        ready = self.is_ready(step)
        return all(self.gather(ready)) if self.is_distributed else True

    def begin(self, step: int, parts: list[int], index: PayloadIndex) -> PayloadWriter:
        """A writer with room for parts of these sizes and `index`, which names them. The former
        writer is void. Raises SegmentSpaceError."""
        with self._writing:
            slot = self._own.begin(step, needed_bytes(parts, index))
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

    def enlarge(self, writer: PayloadWriter, step: int, nbytes: int) -> None:
        """Give the unfinished payload `nbytes` of room; within `finishing`."""
        writer.move_to(self._own.begin(step, nbytes))

    def commit(self, writer: PayloadWriter, index: PayloadIndex) -> None:
        """Declare the payload complete, and report it; within `finishing`."""
        self._own.commit(index.step, writer.finish(index))
        self._writer = None
        self._saved = self._kept = index.step
        self._attachment.report_saved(index.step, self._protected)
        if self._attachment.should_stop:
            self._attachment.wait_replicated(index.step, LEAVE_WAIT_S)

    # --- restoring ------------------------------------------------------------------------------

    def newest(self) -> int | None:
        """The step that can be loaded: the last one saved, else the one that the attempt starts
        from, once it has arrived and is verified. Raises StateMissing, PayloadDamaged."""
        if self._saved is not None:
            return self._saved
        restore = self.place.restore
        if restore.tier not in (Tier.OWN_RAM, Tier.PARTNER_RAM, Tier.RESHARD):
            return None
        if not self._arrived:
            reply = self._attachment.wait_state(self._timeout_s)
            if reply.problem:
                error = PayloadDamaged if reply.damaged else StateMissing
                raise error(f"step {restore.step} cannot be restored from memory: {reply.problem}")
            found = self.find(restore.step)
            if restore.tier is Tier.RESHARD:
                index = found.any_index()
                self._fits = index is not None and index.kind is not PayloadKind.OBJECT
            elif self.place.rank in found.owners:
                found.view(self.place.rank)
            self._arrived = True
        return restore.step if self._fits else None

    def find(self, step: int) -> Payloads:
        """What is at hand of `step`, saved by this attempt, or the one that it starts from."""
        attempt = self._attempt_of(step)
        if self._found is not None and self._found.is_current(attempt, step):
            return self._found  # verified already
        found: dict[int, _AtHand] = {}
        own = self._own.current()
        commit = own.find(attempt, step) if own is not None else None
        if own is not None and commit is not None:
            found[self.place.rank] = _AtHand(own, commit)
        for path in sorted(self._path.parents[1].glob("*/*.seg")):  # also of other worlds
            name = _SEGMENT_FILE.fullmatch(path.name)
            if name and int(name[1]) not in found:
                _add(found, int(name[1]), path, attempt, step)
        self._found = Payloads(found, self.place.rank)
        return self._found

    def taken(self, step: int) -> None:
        """The program goes on from `step`."""
        own, attempt = self._own.current(), self._attempt_of(step)
        commit = own.find(attempt, step) if own is not None else None
        if own is not None and commit is not None:
            own.make_newest(commit)
        self._kept, self._found = step, None  # of other ranks nothing stays mapped
        if attempt != self.place.attempt:
            self._attachment.report_taken(step)

    def _attempt_of(self, step: int) -> int:
        """The attempt that computed `step`, as far as this one knows."""
        own = self._own.current()
        if own is not None and own.find(self.place.attempt, step) is not None:
            return self.place.attempt
        restore = self.place.restore
        return restore.attempt if step == restore.step else self.place.attempt


def _add(found: dict[int, _AtHand], owner: int, path: Path, attempt: int, step: int) -> None:
    try:
        segment = Segment.open(path, writable=False)
    except (FileNotFoundError, BadSegment):
        return  # replaced or removed meanwhile; damage is reported by its own agent
    commit = segment.find(attempt, step)
    if commit is None:
        segment.close()
    else:
        found[owner] = _AtHand(segment, commit)


def together(payloads: RankPayloads, act: Callable[[], Any]) -> list[Any]:
    """The result of `act` on every rank, by rank; all ranks call it. If it fails on one, every
    rank raises, and none waits for it in vain."""
    try:
        outcome = act()
    except WorkersError as error:
        payloads.gather((None, str(error)))
        raise
    outcomes = payloads.gather((outcome, None))
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            raise PeerFailed(f"rank {rank}: {failed}")
    return [each for each, _ in outcomes]
