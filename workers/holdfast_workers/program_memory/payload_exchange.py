"""Brings parts of payloads from the ranks that have them at hand to those that need them.

The plan is pure and the same on every rank, so no rank waits for a message that is never sent. The
bytes travel through a gloo group, in pieces.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from holdfast_workers.errors import WorkersError

PIECE_BYTES = 32 << 20
"""Bytes that are sent as one message."""


class StateMissing(WorkersError):
    """No rank has a payload that is needed."""


@dataclass(frozen=True, order=True)
class PayloadRange:
    """A range of bytes in the payload that the rank `owner` of the saving world wrote."""

    owner: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Transfer:
    """`source` and `target` are ranks of the present world."""

    source: int
    target: int
    range: PayloadRange


def plan_transfers(
    wanted: Sequence[Collection[PayloadRange]], at_hand: Sequence[Collection[int]]
) -> list[Transfer]:
    """The transfers in their order, the same for every order of `wanted`.

    `wanted[rank]`: the ranges that a rank needs; `at_hand[rank]`: owners of the payloads that it
    has. Of several sources, the one that sends least so far is taken. Raises StateMissing.
    """
    holders: dict[int, list[int]] = {}
    for rank, owners in enumerate(at_hand):
        for owner in owners:
            holders.setdefault(owner, []).append(rank)
    sent = [0] * len(at_hand)
    transfers = []
    for target, ranges in enumerate(wanted):
        for each in sorted(set(ranges)):
            if each.owner in at_hand[target] or not each.nbytes:
                continue
            if each.owner not in holders:
                raise StateMissing(
                    f"the memory checkpoint of rank {each.owner} is on none of the "
                    f"{len(at_hand)} nodes' ranks: load another checkpoint"
                )
            source = min(holders[each.owner], key=lambda rank: (sent[rank], rank))
            sent[source] += each.nbytes
            transfers.append(Transfer(source, target, each))
    return transfers


def carry_out(
    transfers: Sequence[Transfer],
    rank: int,
    payload_of: Callable[[int], memoryview],
    group: dist.ProcessGroup,
) -> Mapping[PayloadRange, torch.Tensor]:
    """Send and receive this rank's part of `transfers`; returns what was received, as bytes.
    Every rank of `group` calls it, with the same transfers. Raises RuntimeError if a peer ends or
    does not answer within the group's timeout."""
    received: dict[PayloadRange, torch.Tensor] = {}
    works: list[Any] = []
    for transfer in transfers:
        part = transfer.range
        if transfer.source == rank:
            start = part.offset
            view = payload_of(part.owner)[start : start + part.nbytes]
            works += [
                dist.isend(piece, transfer.target, group) for piece in _split(as_tensor(view))
            ]
        elif transfer.target == rank:
            bytes_of = received[part] = torch.empty(part.nbytes, dtype=torch.uint8)
            works += [dist.irecv(piece, transfer.source, group) for piece in _split(bytes_of)]
    for work in works:
        work.wait()
    return received


def as_tensor(view: memoryview) -> torch.Tensor:
    """A uint8 tensor that shares the memory of `view`, which must not be empty. It must only be
    read if the view is read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=torch.uint8)


def _split(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return [tensor[at : at + PIECE_BYTES] for at in range(0, tensor.numel(), PIECE_BYTES)]
