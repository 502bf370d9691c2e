"""The memory tier of a user's own program: what `holdfast.torch.tier()` returns.

Checkpoints are kept in shared memory of the rank's node and copied to its partners by the node
agent; after a fault the program loads the newest that every rank has. Outside of Holdfast nothing
is saved and nothing is found, unless the user names a folder to fall back on.
"""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast_workers.program_memory.dcp_folder import DcpFolder, NoStorage, newest_in
from holdfast_workers.program_memory.dcp_storage import DcpStorage
from holdfast_workers.program_memory.folder_loading import load_files
from holdfast_workers.program_memory.folder_parts import files_in, read_into
from holdfast_workers.program_memory.found_payloads import Payloads
from holdfast_workers.program_memory.gloo_groups import GlooGroups
from holdfast_workers.program_memory.payload import PayloadIndex, PayloadKind, PayloadPart
from holdfast_workers.program_memory.rank_payloads import RankPayloads, SavedOtherwise, together
from holdfast_workers.program_memory.staging import KeptStaging
from holdfast_workers.program_memory.world_saves import SaveDecision, WorldSave
from holdfast_workers.programs.attachment import Attachment, attach

TIMEOUT_S = 300.0
REPLICATION_WAIT_S = 2.0
OBJECT = "object"
"""The part that contains a saved object."""


class MemoryTier:
    """Memory checkpoints of this rank. All ranks make the same calls in the same order, from one
    thread; only the storage of `at` may be used by `async_save`. A process has one."""

    def __init__(
        self,
        attachment: Attachment | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        replication_wait_s: float = REPLICATION_WAIT_S,
        fallback: str | Path | None = None,
    ) -> None:
        """`timeout_s` bounds the arrival of a state and every exchange between ranks;
        `replication_wait_s` is how long a save waits for the partners' copies of the last one,
        before it is skipped. `fallback`: a folder for the checkpoints of `at` outside of
        Holdfast."""
        attachment = attachment or attach()
        self._fallback = Path(fallback) if fallback is not None else None
        self._groups = GlooGroups(timeout_s)
        self._payloads = (
            RankPayloads(attachment, self._groups, timeout_s, replication_wait_s)
            if attachment.active
            else None
        )
        self._staging = KeptStaging()

    @property
    def active(self) -> bool:
        """Whether Holdfast started this process, so that checkpoints are kept in memory."""
        return self._payloads is not None

    def newest(self) -> int | None:
        """The step that can be loaded, or None: the newest that every rank has saved, at first the
        one that the attempt starts from. Waits until it has arrived."""
        if self._payloads is not None:
            return self._payloads.newest()
        return newest_in(self._fallback) if self._fallback is not None else None

    # --- torch.distributed.checkpoint -----------------------------------------------------------

    def at(self, step: int) -> DcpStorage | DcpFolder | NoStorage:
        """The `storage_writer` or `storage_reader` of `step` for `torch.distributed.checkpoint`."""
        if self._payloads is not None:
            self._payloads.use()
            return DcpStorage(self._payloads, self._staging, step)
        return DcpFolder(self._fallback, step) if self._fallback is not None else NoStorage()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks, for the `process_group` of `async_save`: its collectives then
        never meet those of training. Made by the first use, on all ranks; None without
        torch.distributed."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return self._groups.get("async_save")

    # --- objects --------------------------------------------------------------------------------

    def save(self, step: int, state: object) -> bool:
        """Keep `state`, which `torch.save` can write, as this rank's part of `step`. Returns
        whether all ranks have kept it: not outside of Holdfast, and not while partners lag behind.
        Raises SegmentSpaceError; PeerFailed if another rank cannot keep its part."""
        payloads = self._payloads
        if payloads is None or not (decision := payloads.agree(step)).go:
            return False
        together(payloads, lambda: _keep_object(payloads, decision, state))
        return True

    def load(
        self, *, of_rank: int | None = None, map_location: Any = "cpu", weights_only: bool = True
    ) -> Any:
        """The object that this rank saved at the step `newest()`; None: there is no such step.

        `of_rank`: every rank gets what that rank saved. `weights_only`: as for `torch.load`. All
        ranks call it. Raises StateMissing, PayloadDamaged; PeerFailed if another rank does.
        """
        payloads, step = self._payloads, self.newest()
        if payloads is None or step is None:
            return None
        located = payloads.locate(step)
        rank = payloads.place.rank
        raw = b""

        def read() -> bytes:
            nonlocal raw
            if of_rank in (None, rank):
                raw = _object_bytes(located.at_hand, rank)
                located.at_hand.check_current()
            return raw if of_rank == rank else b""

        raws = together(payloads, read)
        raw = raw or next(filter(None, raws), b"")
        state = torch.load(io.BytesIO(raw), map_location=map_location, weights_only=weights_only)
        payloads.taken(located.save)
        return state

    # --- folders --------------------------------------------------------------------------------

    def save_folder(self, step: int, folder: str | Path | None) -> bool:
        """Keep the files below `folder` as this rank's part of `step`; None: this rank has none.

        A folder that several ranks share is given by one of them only. Returns whether it was
        kept, as `save`. Raises as `save`, and BadFolder.
        """
        payloads = self._payloads
        if payloads is None or not (decision := payloads.agree(step)).go:
            return False
        together(payloads, lambda: _keep_files(payloads, decision, folder))
        return True

    def load_folder(self, folder: str | Path) -> int | None:
        """Write the files of all ranks of the step `newest()` to `folder`; returns the step, or
        None: there is none. Files of other names stay. All ranks call it; of those on a node that
        name the same folder, one writes. Raises BadFolder, StateMissing, PayloadDamaged;
        PeerFailed if another rank does."""
        payloads, step = self._payloads, self.newest()
        if payloads is None or step is None:
            return None
        load_files(payloads, step, Path(folder))
        return step


def _keep_object(payloads: RankPayloads, decision: SaveDecision, state: object) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getbuffer()
    index = _index(payloads, PayloadKind.OBJECT, decision.save, {OBJECT: content.nbytes})
    writer = payloads.begin(decision, [content.nbytes], index)
    with payloads.finishing(writer):
        parts = {OBJECT: writer.copy(content)}
        payloads.commit(writer, decision, replace(index, parts=parts))


def _keep_files(payloads: RankPayloads, decision: SaveDecision, folder: str | Path | None) -> None:
    files = files_in(Path(folder)) if folder is not None else {}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    index = _index(payloads, PayloadKind.FOLDER, decision.save, sizes)
    writer = payloads.begin(decision, list(sizes.values()), index)
    with payloads.finishing(writer):
        parts = {
            name: writer.fill(sizes[name], partial(read_into, path)) for name, path in files.items()
        }
        payloads.commit(writer, decision, replace(index, parts=parts))


def _index(
    payloads: RankPayloads, kind: PayloadKind, save: WorldSave, sizes: dict[str, int]
) -> PayloadIndex:
    """The index before the parts have their places; as long as with them."""
    place = payloads.place
    most = sum(sizes.values()) + 64 * (len(sizes) + 1)
    parts = {name: PayloadPart(most, size) for name, size in sizes.items()}
    return PayloadIndex(kind, save.step, place.rank, place.world_size, parts, number=save.number)


def _object_bytes(found: Payloads, rank: int) -> bytes:
    index = found.index(rank)
    part = index.parts.get(OBJECT)
    if index.kind is not PayloadKind.OBJECT or part is None:
        raise SavedOtherwise(
            f"step {index.step} was saved as {index.kind}, not by save(): load it as it was saved"
        )
    return bytes(found.view(rank)[part.offset : part.offset + part.nbytes])
