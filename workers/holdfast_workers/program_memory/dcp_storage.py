"""Checkpoints of `torch.distributed.checkpoint` (DCP) in this rank's memory, and back from it.

Uses only DCP's own collectives for saving: what each rank has, and the decision that follows from
it, travel with its plans, so `async_save` may run beside training. Each rank commits its payload
when it is written; the coordinator, whose payload holds the metadata, commits last.
"""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast_workers.errors import WorkersError
from holdfast_workers.program_memory.found_payloads import Payloads
from holdfast_workers.program_memory.payload import (
    PayloadIndex,
    PayloadKind,
    PayloadPart,
    PayloadWriter,
    needed_bytes,
)
from holdfast_workers.program_memory.payload_exchange import (
    PayloadRange,
    StateMissing,
    as_tensor,
    carry_out,
    plan_transfers,
)
from holdfast_workers.program_memory.rank_payloads import (
    LocatedStep,
    RankPayloads,
    SavedOtherwise,
    WrongWorld,
    together,
)
from holdfast_workers.program_memory.staging import KeptStaging
from holdfast_workers.program_memory.world_saves import SaveDecision, decide

METADATA = ".metadata"
"""The part with the pickled metadata, in the coordinator's payload."""
METADATA_BYTES = 1 << 16
METADATA_BYTES_PER_ITEM = 512
"""Room that is set aside for the metadata, before its size is known."""
COORDINATOR = 0


class WrongPlan(WorkersError):
    """The planner does not pass on what the storage has agreed on."""


@dataclass(frozen=True)
class _PlannedSave:
    """The coordinator's decision about a save, for every rank."""

    decision: SaveDecision
    alone: bool
    """DCP saves on this rank alone, without the others."""
    metadata_bytes: int


@dataclass(frozen=True)
class Stored:
    """The place of an item, and the meaning of its bytes."""

    range: PayloadRange
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """The tensor's dtype; None for bytes that DCP's planner reads."""

    def rows(self, item: ReadItem) -> PayloadRange:
        """The part that `item` needs: of a tensor, the rows between its first and its last."""
        if self.dtype is None or not self.shape:
            return self.range
        row_bytes = self.range.nbytes // self.shape[0] if self.shape[0] else 0
        start, count = item.storage_offsets[0], item.lengths[0]
        offset = self.range.offset + start * row_bytes
        return PayloadRange(self.range.owner, offset, count * row_bytes)


class DcpStorage(StorageWriter, StorageReader, AsyncStager):
    """`storage_writer` and `storage_reader` for one step; also makes the copy for `async_save`."""

    def __init__(self, payloads: RankPayloads, staging: KeptStaging, step: int) -> None:
        self._payloads = payloads
        self._staging = staging
        self._stager: DefaultStager | None = None
        self._step = step
        self._planned: _PlannedSave | None = None
        self._writer: PayloadWriter | None = None
        self._located: LocatedStep | None = None
        self._stored: dict[MetadataIndex, Stored] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A checkpoint in memory is known by its step alone; `checkpoint_id` is ignored."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    # --- stager ---------------------------------------------------------------------------------

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        staged, self._stager = self._staging.stage(state_dict)
        return staged

    def synchronize_staging(self) -> None:
        """The copy is complete when `stage` returns."""

    def close(self) -> None:
        """The memory stays for the next save."""

    # --- writer ---------------------------------------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._planned = None

    def prepare_local_plan(self, plan: Any) -> Any:
        if isinstance(plan, LoadPlan):
            return plan
        return replace(plan, storage_data=self._payloads.standing(self._step))

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        if plans and isinstance(plans[0], LoadPlan):
            return self._plan_reading(plans)
        place = self._payloads.place
        if len(plans) not in (1, place.world_size):
            raise WrongWorld(
                f"a checkpoint of {len(plans)} of {place.world_size} ranks cannot be kept in "
                "memory: call torch.distributed.checkpoint with a process group of all ranks"
            )
        items = sum(len(plan.items) for plan in plans)
        standings = [plan.storage_data for plan in plans]
        self._planned = _PlannedSave(
            decide(standings, place.attempt, place.world_size),
            alone=len(plans) < place.world_size,
            metadata_bytes=METADATA_BYTES + METADATA_BYTES_PER_ITEM * items,
        )
        return [replace(plan, storage_data=self._planned) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        planned = plan.storage_data
        if not isinstance(planned, _PlannedSave) or planned.decision.save.step != self._step:
            raise WrongPlan(
                "the save planner has replaced the plan of this step: use one that does not "
                "cache plans (enable_plan_caching=False)"
            )
        self._payloads.follow(planned.decision)
        results = self._write(plan, planner, planned) if planned.decision.go else []
        if self._stager is not None:
            self._staging.give_back(self._stager)
            self._stager = None
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        planned, writer = self._planned, self._writer
        self._writer = None
        if planned is None or not planned.decision.go:
            return
        assert writer is not None
        metadata.storage_data = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        raw = pickle.dumps(metadata)
        index = self._index(planned, {METADATA: PayloadPart(writer.written_bytes, len(raw))})
        with self._payloads.finishing(writer):
            if not writer.room_for(len(raw), index):
                nbytes = needed_bytes([writer.written_bytes, len(raw)], index)
                self._payloads.enlarge(writer, planned.decision, nbytes)
            writer.copy(raw)
            self._payloads.commit(writer, planned.decision, index)

    def _write(
        self, plan: SavePlan, planner: SavePlanner, planned: _PlannedSave
    ) -> list[WriteResult]:
        rank = self._payloads.place.rank
        contents = [planner.resolve_data(item) for item in plan.items]
        sizes = [_size_of(content) for content in contents]
        # `finish` is called where the plans were made.
        finishes = self._planned is not None
        room = [*sizes, planned.metadata_bytes] if finishes else sizes
        index = self._index(planned, {})
        writer = self._payloads.begin(planned.decision, room, index)
        results = []
        with self._payloads.finishing(writer):
            for item, content, nbytes in zip(plan.items, contents, sizes, strict=True):
                part = _write_content(writer, content, nbytes)
                stored = Stored(PayloadRange(rank, part.offset, nbytes))
                if isinstance(content, torch.Tensor):
                    stored = replace(stored, shape=tuple(content.shape), dtype=content.dtype)
                results.append(WriteResult(item.index, nbytes, stored))
            if finishes:
                self._writer = writer
            else:
                self._payloads.commit(writer, planned.decision, index)
        return results

    def _index(self, planned: _PlannedSave, parts: dict[str, PayloadPart]) -> PayloadIndex:
        place, save = self._payloads.place, planned.decision.save
        return PayloadIndex(
            PayloadKind.DCP,
            save.step,
            place.rank,
            place.world_size,
            parts,
            number=save.number,
            alone=planned.alone,
        )

    # --- reader ---------------------------------------------------------------------------------

    def read_metadata(self) -> Metadata:
        """All ranks call it together, if there are several."""
        self._located = located = self._payloads.locate(self._step)
        found = located.at_hand
        if any(together(self._payloads, lambda: _is_alone(found))):
            raw = _metadata_bytes(found, self._payloads.place.rank)
            return _metadata(raw, self._step)
        holders = [rank for rank, owners in enumerate(located.owners) if COORDINATOR in owners]
        if not holders:
            raise StateMissing(
                f"no rank has the metadata of step {self._step} in memory: load another checkpoint"
            )
        # Without torch.distributed, only this rank is known.
        is_holder = len(located.owners) == 1 or self._payloads.place.rank == holders[0]
        raws = together(
            self._payloads, lambda: _metadata_bytes(found, COORDINATOR) if is_holder else b""
        )
        return _metadata(raws[holders[0]], self._step)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._stored = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._located is not None
        at_hand = self._located.at_hand
        received: Any = {}
        if plan.storage_data:
            rank, group = dist.get_rank(), self._payloads.exchange_group
            received = carry_out(plan.storage_data, rank, at_hand.view, group)
        for item in plan.items:
            stored = self._stored[item.storage_index]
            rows = stored.rows(item)
            if not rows.nbytes:
                raw = torch.empty(0, dtype=torch.uint8)
            elif rows in received:
                raw = received[rows]
            else:
                end = rows.offset + rows.nbytes
                raw = as_tensor(at_hand.view(rows.owner)[rows.offset : end])
            _read_item(item, stored, raw, planner)
        at_hand.check_current()
        self._payloads.taken(self._located.save)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _plan_reading(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len(plans) == 1:
            return plans
        wanted = [
            {self._stored[item.storage_index].rows(item) for item in plan.items} for plan in plans
        ]
        assert self._located is not None
        transfers = plan_transfers(wanted, self._located.owners)
        return [
            replace(
                plan,
                storage_data=[each for each in transfers if rank in (each.source, each.target)],
            )
            for rank, plan in enumerate(plans)
        ]


def _size_of(content: Any) -> int:
    if isinstance(content, torch.Tensor):
        return content.numel() * content.element_size()
    return len(content.getbuffer())


def _write_content(writer: PayloadWriter, content: Any, nbytes: int) -> Any:
    if not isinstance(content, torch.Tensor):
        return writer.copy(content.getbuffer())
    if not nbytes:
        return writer.copy(b"")
    tensor = content.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return writer.copy(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def fill(target: memoryview) -> None:
        as_tensor(target).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return writer.fill(nbytes, fill)


def _read_item(item: ReadItem, stored: Stored, raw: torch.Tensor, planner: LoadPlanner) -> None:
    if item.type is LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(raw.numpy().tobytes()))
        return
    assert stored.dtype is not None
    target = planner.resolve_tensor(item).detach()
    source = raw.view(stored.dtype) if raw.numel() else torch.empty(0, dtype=stored.dtype)
    if stored.shape:
        source = source.view(item.lengths[0], *stored.shape[1:])
        for dim in range(1, len(stored.shape)):
            source = source.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
    else:
        source = source.view(())
    target.copy_(source)
    planner.commit_tensor(item, target)


def _is_alone(found: Payloads) -> bool:
    index = found.any_index()
    return index is not None and index.alone


def _metadata_bytes(found: Payloads, owner: int) -> bytes:
    index = found.index(owner)
    part = index.parts.get(METADATA)
    if index.kind is not PayloadKind.DCP or part is None:
        raise SavedOtherwise(
            f"step {index.step} was saved as {index.kind}, not by torch.distributed.checkpoint: "
            "load it as it was saved"
        )
    return bytes(found.view(owner)[part.offset : part.offset + part.nbytes])


def _metadata(raw: bytes, step: int) -> Metadata:
    metadata = pickle.loads(raw)
    if not isinstance(metadata, Metadata):
        raise StateMissing(f"step {step} in memory has no metadata: load another checkpoint")
    return metadata
