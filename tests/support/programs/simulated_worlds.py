"""Worlds of ranks that keep memory checkpoints, in threads of one process: the real memory tier on
real segments, with collectives, launchers and partners that a test controls.

Quick enough for random histories. `tier_worlds` has real processes.
"""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.waiting import DEADLINE_S
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.utils import _DistWrapper

from holdfast_service.placement.restore_points import (
    HeldCopy,
    HistoryLine,
    RestoreSource,
    find_restore_point,
    restore_for,
)
from holdfast_workers.memory.segment import Segment, SegmentSpaceError
from holdfast_workers.memory.segment_store import SegmentStore, mesh_tag
from holdfast_workers.memory.state_delivery import parts_for
from holdfast_workers.program_memory import dcp_storage, folder_loading, own_segment
from holdfast_workers.program_memory.found_payloads import save_of
from holdfast_workers.program_memory.memory_tier import MemoryTier
from holdfast_workers.program_memory.payload import PayloadIndex, PayloadWriter, payload_facts
from holdfast_workers.program_memory.payload_exchange import PayloadRange, Transfer
from holdfast_workers.program_memory.rank_payloads import RankPayloads
from holdfast_workers.program_memory.world_saves import SaveDecision, WorldSave
from holdfast_workers.protocol.messages import Place, Restore
from holdfast_workers.protocol.processes import StateReply
from holdfast_workers.protocol.programs import ProgramPlace

_this_thread = threading.local()


class Died(BaseException):
    """This rank's process is killed here."""


@dataclass(frozen=True)
class Fault:
    """What happens to a rank when it reaches `point` of a save."""

    point: str
    """"begin", "begun", "commit" or "committed"."""
    dies: bool
    """Its process dies; otherwise its node has no room."""


class _Collectives:
    """Those of one call of all ranks. A rank whose process has died breaks those that it has not
    joined, for all others."""

    def __init__(self, world_size: int) -> None:
        self._changed = threading.Condition()
        self._values: list[list[bytes]] = [[] for _ in range(world_size)]
        self._dead: set[int] = set()

    def gather(self, rank: int, value: Any) -> list[Any]:
        with self._changed:
            number = len(self._values[rank])
            self._values[rank].append(pickle.dumps(value))
            self._changed.notify_all()

            def missing() -> set[int]:
                found = range(len(self._values))
                return {rank for rank in found if len(self._values[rank]) <= number}

            assert self._changed.wait_for(
                lambda: not missing() or missing() & self._dead, DEADLINE_S
            )
            if missing():
                raise ConnectionError(f"ranks {missing()} have ended")
            return [pickle.loads(values[number]) for values in self._values]

    def end(self, rank: int) -> None:
        with self._changed:
            self._dead.add(rank)
            self._changed.notify_all()


class _Boxes:
    """What ranks send each other: those that have nothing to send or to get take no part."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._contents: dict[tuple[int, PayloadRange], torch.Tensor] = {}

    def put(self, box: tuple[int, PayloadRange], content: torch.Tensor) -> None:
        with self._changed:
            self._contents[box] = content
            self._changed.notify_all()

    def take(self, box: tuple[int, PayloadRange]) -> torch.Tensor:
        with self._changed:
            assert self._changed.wait_for(lambda: box in self._contents, DEADLINE_S)
            return self._contents.pop(box)


class _Wrapper(_DistWrapper):
    """The collectives of `torch.distributed.checkpoint`."""

    def __init__(self, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        self.group, self.use_dist = group, use_dist
        self.coordinator_rank = self.global_coordinator_rank = coordinator_rank
        self.rank = _this_thread.rank
        self.is_coordinator = self.rank == coordinator_rank
        self._world: SimulatedWorld = _this_thread.world

    def get_world_size(self) -> int:
        return self._world.size

    def broadcast_object(self, object: Any) -> Any:
        return self._world.gather(object)[self.coordinator_rank]

    def gather_object(self, object: Any) -> Any:
        values = self._world.gather(object)
        return values if self.is_coordinator else None

    def all_gather_object(self, object: Any) -> Any:
        return self._world.gather(object)

    def scatter_object(self, object_list: Any) -> Any:
        return self._world.gather(object_list)[self.coordinator_rank][self.rank]


class _Payloads(RankPayloads):
    """Those of a rank of a simulated world."""

    world: SimulatedWorld

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def exchange_group(self) -> Any:
        return None

    def gather(self, value: Any) -> list[Any]:
        return self.world.gather(value)

    def begin(self, decision: SaveDecision, parts: list[int], index: PayloadIndex) -> PayloadWriter:
        self.world.reach("begin")
        writer = super().begin(decision, parts, index)
        self.world.reach("begun")
        return writer

    def commit(self, writer: PayloadWriter, decision: SaveDecision, index: PayloadIndex) -> None:
        self.world.reach("commit")
        super().commit(writer, decision, index)
        self.world.committed.setdefault(decision.save, set()).add(self.place.rank)
        self.world.reach("committed")


@dataclass
class _Attachment:
    """A rank's attachment, without a launcher: the test says what its partner holds."""

    place: ProgramPlace
    active: bool = True
    should_stop: bool = False
    has_partner: bool = True
    offered: WorldSave | None = None
    replicated: set[str] = field(default_factory=set)
    protected: int = -1

    def wait_state(self, timeout_s: float) -> StateReply:
        return StateReply(self.place.attempt)

    def report_saved(self, step: int, protected: int = -1) -> None:
        self.protected = max(self.protected, protected)

    def report_taken(self, step: int) -> None:
        pass

    def is_replicated(self, step: int, digest: str, timeout_s: float = 0.0) -> bool:
        return not self.has_partner or digest in self.replicated


class SimulatedWorld:
    """A job's program: attempts of `size` ranks, each on a node of its own, whose partner is the
    next rank's node. Node `r` is the folder `node-r`; it stays when a smaller world has no rank on
    it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.size = 0
        self.attempt = 0
        self.restored: WorldSave | None = None
        """The save that the attempt starts from."""
        self.tiers: list[MemoryTier] = []
        self.committed: dict[WorldSave, set[int]] = {}
        """The ranks that committed their parts of a save."""
        self.faults: Mapping[int, Fault] = {}
        self._line = HistoryLine()
        self._attachments: list[_Attachment] = []
        self._collectives = _Collectives(0)
        self._boxes = _Boxes()

    def start_attempt(self, size: int) -> None:
        """Start `size` ranks anew, from the newest step that memory has for as many."""
        self.attempt += 1
        self.size = size
        restores = self._deliver()
        self._line = self._line.with_attempt(self.attempt, restores[0].step)
        self._line = self._line.with_run(self.attempt)
        self._attachments = [
            _Attachment(self._place(rank, restore), has_partner=size > 1)
            for rank, restore in enumerate(restores)
        ]
        self.tiers = [self._tier(attachment) for attachment in self._attachments]

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """The result of `program(rank)`, or the exception that ended it, by rank."""
        self._collectives = _Collectives(self.size)
        results: list[Any] = [None] * self.size

        def main(rank: int) -> None:
            _this_thread.rank, _this_thread.world = rank, self
            try:
                results[rank] = program(rank)
            except BaseException as error:
                results[rank] = error
            finally:
                self._collectives.end(rank)

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLINE_S)
            assert not thread.is_alive()
        return results

    def gather(self, value: Any) -> list[Any]:
        return self._collectives.gather(_this_thread.rank, value)

    def reach(self, point: str) -> None:
        """The rank of this thread is at this point of a save."""
        fault = self.faults.get(_this_thread.rank)
        if fault is not None and fault.point == point:
            raise Died if fault.dies else SegmentSpaceError("no room")

    # --- nodes ----------------------------------------------------------------------------------

    def push(self, rank: int) -> None:
        """The partner gets the newest commit of a rank, as its agent sends it."""
        own = self._store(rank).find(rank, Place.OWN)
        if self.size == 1 or own is None or not own.commits():
            return
        commit, *others = own.commits()
        target = self._store((rank + 1) % self.size)
        replaces = target.prepare_replica(rank, own.layout)
        for each in (*(others if replaces else ()), commit):
            replica = target.replica_of_size(rank, own.layout.payload_bytes)
            assert replica is not None
            held = replica.find(each.attempt, each.step, digest=each.digest)
            if held is not None and held.digest == each.digest:
                continue
            beside = others[0] if others and each is commit else None
            keep = (
                replica.find(beside.attempt, beside.step, digest=beside.digest)
                if beside is not None
                else None
            )
            replica.begin(each.step, keep=keep)[:] = own.slot(each)
            replica.commit(attempt=each.attempt, step=each.step, digest=each.digest)
            target.put_in_place(rank, replica)
        self._attachments[rank].replicated.add(commit.digest)

    def lose_node(self, rank: int) -> None:
        shutil.rmtree(self.folder / f"node-{rank}", ignore_errors=True)

    def own_saves(self, rank: int) -> set[WorldSave]:
        return _saves(self._store(rank).find(rank, Place.OWN))

    def partner_saves(self, rank: int) -> set[WorldSave]:
        return _saves(self._store((rank + 1) % self.size).find(rank, Place.REPLICA))

    def carry_out(
        self,
        transfers: Sequence[Transfer],
        rank: int,
        payload_of: Callable[[int], memoryview],
        group: Any,
    ) -> Mapping[PayloadRange, torch.Tensor]:
        for each in (each for each in transfers if each.source == rank):
            part, view = each.range, payload_of(each.range.owner)
            content = bytearray(view[part.offset : part.offset + part.nbytes])
            self._boxes.put((each.target, part), torch.frombuffer(content, dtype=torch.uint8))
        return {
            each.range: self._boxes.take((rank, each.range))
            for each in transfers
            if each.target == rank
        }

    def free_others(self) -> None:
        """Free the state of former worlds, once all partners hold a step that is newer than that
        which the attempt started from."""
        start = self.restored.step if self.restored is not None else 0
        if self._attachments[0].protected > start:
            for node in self._nodes():
                store = self._store(node)
                store.keep_only({node} & set(range(self.size)), {(node - 1) % self.size})
                store.free_others()

    def _deliver(self) -> list[Restore]:
        """Find the newest step that memory has, and bring it to the ranks that lack it."""
        copies = []
        for node in self._nodes():
            store = self._store(node)
            for mesh in store.meshes():
                for held in store.for_mesh(mesh).held(verified=True):
                    copies.append(HeldCopy(f"node-{node}", "", "", 1, held))
        point = find_restore_point(
            world_size=self.size,
            mesh={"dp_shard": self.size},
            copies=copies,
            remotes=(),
            line=self._line,
        )
        restores = [restore_for(rank, f"node-{rank}", point) for rank in range(self.size)]
        self.restored = None
        if point.number is None:
            return restores
        self.restored = WorldSave(point.attempt, point.number, point.step)
        for rank, restore in enumerate(restores):
            if point.source is RestoreSource.RESHARD:
                parts = parts_for(rank, self.size, restore, f"node-{rank}")
            else:
                parts = {rank: restore}
            for owner, source in parts.items():
                self._bring(rank, owner, source, point.mesh or mesh_tag({"dp_shard": self.size}))
        return restores

    def _bring(self, node: int, rank: int, source: Restore, mesh: str) -> None:
        """Bring the state of `rank` of the world `mesh` to a node, as its own."""
        target = self._store(node).for_mesh(mesh).path(rank, Place.OWN)
        found = self.folder / source.agent / mesh / target.with_stem(f"{source.place}-{rank}").name
        if found != target:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, target)

    def _nodes(self) -> list[int]:
        return sorted(int(path.name.removeprefix("node-")) for path in self.folder.glob("node-*"))

    def _store(self, node: int) -> SegmentStore:
        mesh = mesh_tag({"dp_shard": self.size})
        return SegmentStore(self.folder / f"node-{node}", mesh, facts_of=payload_facts)

    def _place(self, rank: int, restore: Restore) -> ProgramPlace:
        path = self._store(rank).path(rank, Place.OWN)
        path.parent.mkdir(parents=True, exist_ok=True)
        return ProgramPlace(
            job_id="job",
            attempt=self.attempt,
            rank=rank,
            world_size=self.size,
            beacon="",
            segment_path=str(path),
            restore=restore,
            has_partner=self.size > 1,
        )

    def _tier(self, attachment: Any) -> MemoryTier:
        tier = MemoryTier(attachment)
        payloads = _Payloads(attachment, tier._groups, DEADLINE_S, 0.0)
        payloads.world = self
        tier._payloads = payloads
        return tier


@contextmanager
def simulated_world(folder: Path) -> Iterator[SimulatedWorld]:
    """A world whose segments have little room to grow."""
    world = SimulatedWorld(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_segment, "HEAD_ROOM_BYTES", 0)
        patch.setattr(dcp_storage, "METADATA_BYTES", 1 << 10)
        for module in (state_dict_saver, state_dict_loader):
            patch.setattr(module, "_DistWrapper", _Wrapper)
        for module in (dcp_storage, folder_loading):
            patch.setattr(module, "carry_out", world.carry_out)
        patch.setattr("torch.distributed.get_rank", lambda *_: _this_thread.rank)
        yield world


def _saves(segment: Segment | None) -> set[WorldSave]:
    return {save_of(segment, commit) for commit in segment.commits()} if segment else set()
