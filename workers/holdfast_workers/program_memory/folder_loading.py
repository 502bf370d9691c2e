"""Brings the files of all ranks of a step into folders of the nodes' ranks.

Ranks of a node that name the same folder share it: the first of them writes, and the others wait
until it has. Every rank takes part in the exchange to its end, also one that cannot write, so that
none waits for a message that is never sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast_workers.program_memory.folder_parts import FolderWriter, batches_of, pieces_of
from holdfast_workers.program_memory.found_payloads import Payloads
from holdfast_workers.program_memory.payload import PayloadIndex, PayloadKind
from holdfast_workers.program_memory.payload_exchange import StateMissing, carry_out, plan_transfers
from holdfast_workers.program_memory.rank_payloads import RankPayloads, SavedOtherwise, together

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class _FilesAtHand:
    """A rank's contribution to the load."""

    target: tuple[Hashable, ...]
    """The rank's node, and the folder there."""
    indices: Mapping[int, PayloadIndex]
    """The indices of the payloads that the rank has at hand, by owner."""


def load_files(payloads: RankPayloads, step: int, folder: Path) -> None:
    """Write the files of all ranks of `step` to `folder`, from which the program goes on; all ranks
    call it. Raises BadFolder, StateMissing, PayloadDamaged, and StepsDiffer; if it fails on one
    rank, PeerFailed on the others."""
    located = payloads.locate(step)
    found = located.at_hand
    at_hand = together(payloads, lambda: _at_hand(payloads, found, folder))
    indices = {owner: index for each in at_hand for owner, index in each.indices.items()}
    _check_complete(step, indices)
    rank = payloads.place.rank if len(at_hand) > 1 else 0
    known = [list(each.indices) for each in at_hand]
    writers = writing_ranks([each.target for each in at_hand])
    pieces = pieces_of({owner: index.parts for owner, index in indices.items()})
    by_range = {piece.range: piece for piece in pieces}
    transfers = plan_transfers(
        [list(by_range) if each in writers else [] for each in range(len(at_hand))], known
    )
    writes, names = rank in writers, [piece.name for piece in pieces]
    writer = FolderWriter(folder, names, payloads.place.rank, writes=writes)
    try:
        for piece in pieces:
            if writes and piece.range.owner in known[rank]:
                start = piece.range.offset
                view = found.view(piece.range.owner)
                writer.write(piece, view[start : start + piece.range.nbytes])
        for batch in batches_of(transfers):
            received = carry_out(batch, rank, found.view, payloads.exchange_group)
            for range_, content in received.items():
                writer.write(by_range[range_], content.numpy().data)
        together(payloads, lambda: _finish(found, writer))
    finally:
        writer.discard()
    payloads.taken(located.save)


def writing_ranks(targets: Sequence[Hashable]) -> set[int]:
    """The first rank of each target; `targets[rank]`. Pure."""
    return {targets.index(target) for target in targets}


def _at_hand(payloads: RankPayloads, found: Payloads, folder: Path) -> _FilesAtHand:
    room = Path(payloads.place.segment_path).parent.stat()
    node = (socket.gethostname(), BOOT_ID.read_text(), room.st_dev, room.st_ino)
    indices = {owner: found.index(owner) for owner in found.owners}
    return _FilesAtHand((*node, os.path.realpath(folder)), indices)


def _finish(found: Payloads, writer: FolderWriter) -> None:
    found.check_current()
    writer.finish()


def _check_complete(step: int, indices: Mapping[int, PayloadIndex]) -> None:
    """Raises StateMissing, on all ranks or on none."""
    for index in indices.values():
        if index.kind is not PayloadKind.FOLDER:
            raise SavedOtherwise(
                f"step {step} was saved as {index.kind}, not by save_folder(): load it as it was "
                "saved"
            )
    world_size = next((index.world_size for index in indices.values()), 1)
    missing = sorted(set(range(world_size)) - set(indices))
    if missing:
        raise StateMissing(f"step {step}: no rank has the files of ranks {missing} in memory")
