"""Every step commits through a world-wide agreement: one all-gather of one small record a rank.

The record carries what all ranks must know before anyone may apply the step: loss, gradient
norm, whether anything was not finite, which samples were consumed, the digest of the state after
the previous step, how far state is replicated, whether training is to stop, and how often to save.
Numbers of a user's own, where a step has any, follow in a second one.
Folding the records is pure and in rank order, so that ranks which hold the same records hold the
same result, bit for bit; a record of another attempt or step makes the fold raise, so such a step
is applied by nobody.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from holdfast_workers.errors import WorkersError
from holdfast_workers.state.digest import step_digest
from holdfast_workers.state.replicas import Comparison
from holdfast_workers.training.guards import Trip

_RECORD = struct.Struct("<qqdqdd???xIqQqq16sqqqd")
_SAMPLE_DIGEST_MODULUS = 1 << 64


class Disagreement(WorkersError):
    """Ranks do not speak of the same attempt and step, or replicas differ: nothing may commit."""


@dataclass(frozen=True)
class Contribution:
    """What a rank's recipe brings to the agreement on one step.

    `loss_sum` over `count` targets, `grad_sq` and `samples` are shares of a whole: a rank brings
    only what no other rank brings too, except that all ranks of one `data_index` (tensor-parallel
    peers) read the same samples and bring the same `samples` digest, which counts once.
    """

    loss_sum: float
    count: int
    grad_sq: float
    """Squared gradient norm of this rank's share, each global element counted on one rank only."""
    data_index: int
    samples: int
    """64-bit digest of the samples read; see `sample_order.samples_digest`."""
    sample_count: int
    nonfinite: bool = False
    changed: bool = False
    """This rank's parameters are not what they were after the step before."""
    loader_wait_s: float = 0.0
    own: Mapping[str, float] = field(default_factory=dict)
    """Numbers of a user's own, by name; finite."""


@dataclass(frozen=True)
class Record:
    """A contribution with what the loop adds to it: one rank's whole record."""

    attempt: int
    step: int
    contribution: Contribution
    state_step: int
    """The step that `state_digest` belongs to; -1 if there is none."""
    state_digest: bytes = bytes(16)
    replicated_step: int = -1
    stop: bool = False
    """This rank was told that training is to stop after a step that all agree on."""
    intervals: tuple[int, int] = (0, 0)
    """Steps between two saves to memory, and to the remote tier, as this rank was told."""
    compute_s: float = 0.0
    """What this rank spent on the step without waiting: for peers, for data, for checkpoints."""
    own_bytes: int = 0
    """How long the contribution's own numbers are; they are not in the record."""

    def pack(self) -> bytes:
        share = self.contribution
        return _RECORD.pack(
            self.attempt,
            self.step,
            share.loss_sum,
            share.count,
            share.grad_sq,
            share.loader_wait_s,
            share.nonfinite,
            share.changed,
            self.stop,
            self.own_bytes,
            share.data_index,
            share.samples,
            share.sample_count,
            self.state_step,
            self.state_digest,
            self.replicated_step,
            *self.intervals,
            self.compute_s,
        )

    @classmethod
    def unpack(cls, packed: bytes) -> Record:
        (
            attempt,
            step,
            loss_sum,
            count,
            grad_sq,
            loader_wait_s,
            nonfinite,
            changed,
            stop,
            own_bytes,
            data_index,
            samples,
            sample_count,
            state_step,
            state_digest,
            replicated_step,
            *intervals,
            compute_s,
        ) = _RECORD.unpack(packed)
        share = Contribution(
            loss_sum=loss_sum,
            count=count,
            grad_sq=grad_sq,
            data_index=data_index,
            samples=samples,
            sample_count=sample_count,
            nonfinite=nonfinite,
            changed=changed,
            loader_wait_s=loader_wait_s,
        )
        return cls(
            attempt,
            step,
            share,
            state_step,
            state_digest,
            replicated_step,
            stop,
            (intervals[0], intervals[1]),
            compute_s,
            own_bytes,
        )


@dataclass(frozen=True)
class Agreed:
    """What the whole world agreed on; equal on every rank."""

    attempt: int
    step: int
    loss: float
    """Mean over all targets of the step."""
    grad_norm: float
    nonfinite: bool
    samples: str
    """Digest of the (position, sample) pairs consumed; independent of the world's size."""
    sample_count: int
    loader_wait_s: float
    """The longest wait of any rank."""
    state_step: int
    """The step that `state_digest` belongs to; -1 if there is none."""
    state_digest: str | None
    rank_digests: tuple[str, ...]
    replicated_step: int
    """The newest step whose state every rank knows to be replicated; -1 for none."""
    stop: bool = False
    """Some rank was told to stop: this step is the last, on every rank."""
    intervals: tuple[int, int] = (0, 0)
    """As rank 0 was told, for all: from this step on."""
    compute_s: tuple[float, ...] = ()
    """What each rank spent on the step without waiting, by rank."""
    trip: Trip | None = None
    """What the guards have against the step."""
    own_bytes: int = 0
    """Of the longest of the ranks' own numbers: if there are any, they are to be gathered."""
    own: dict[str, float] = field(default_factory=dict)
    """Numbers of a user's own: means over the ranks that bring them."""


def fold(records: Sequence[Record], replicas: Comparison | None = None) -> Agreed:
    """The world's view of a step from its records in rank order; pure.

    Raises Disagreement if the records are not all of one attempt and step, if their state digests
    are of different steps, or if tensor-parallel peers read different samples; CorruptionFound if
    ranks that `replicas` compares do not hold the same state.
    """
    first = records[0]
    for rank, record in enumerate(records):
        if (record.attempt, record.step) != (first.attempt, first.step):
            raise Disagreement(
                f"rank {rank} is at attempt {record.attempt}, step {record.step}; "
                f"rank 0 at attempt {first.attempt}, step {first.step}"
            )
        if record.state_step != first.state_step:
            raise Disagreement(
                f"rank {rank} brings a state digest of step {record.state_step}; "
                f"rank 0 of step {first.state_step}"
            )
    shares = [record.contribution for record in records]
    digests = tuple(record.state_digest.hex() for record in records)
    known = first.state_step >= 0
    if replicas is not None:
        changed = [share.changed for share in shares]
        replicas.check(first.attempt, first.step - 1, digests if known else (), changed)
    samples, sample_count = _fold_samples(shares)
    loss_sum, count, grad_sq = 0.0, 0, 0.0
    for share in shares:
        loss_sum += share.loss_sum
        count += share.count
        grad_sq += share.grad_sq
    nonfinite = any(share.nonfinite for share in shares) or not (
        math.isfinite(loss_sum) and math.isfinite(grad_sq)
    )
    return Agreed(
        attempt=first.attempt,
        step=first.step,
        loss=loss_sum / count if count else math.nan,
        grad_norm=math.sqrt(grad_sq) if grad_sq >= 0 else math.nan,
        nonfinite=nonfinite,
        samples=f"{samples:016x}",
        sample_count=sample_count,
        loader_wait_s=max(share.loader_wait_s for share in shares),
        state_step=first.state_step,
        state_digest=step_digest(digests) if known else None,
        rank_digests=digests if known else (),
        replicated_step=min(record.replicated_step for record in records),
        stop=any(record.stop for record in records),
        intervals=first.intervals,
        compute_s=tuple(record.compute_s for record in records),
        own_bytes=max(record.own_bytes for record in records),
    )


def gather(record: Record, world_size: int) -> list[Record]:
    """Every rank's record, in rank order. One collective; none in a world of one."""
    return [Record.unpack(one) for one in gather_packed(record.pack(), world_size)]


def own_packed(own: Mapping[str, float]) -> bytes:
    """A user's own numbers as bytes; none of none."""
    return json.dumps(own, separators=(",", ":")).encode() if own else b""


def own_means(own: Mapping[str, float], most_bytes: int, world_size: int) -> dict[str, float]:
    """As `fold_own`, of all ranks. One collective; `most_bytes`: of the longest."""
    return fold_own(gather_packed(own_packed(own).ljust(most_bytes), world_size))


def fold_own(packed: Sequence[bytes]) -> dict[str, float]:
    """The mean of each number over the ranks that bring it; pure, as `fold`."""
    of_ranks = [json.loads(one) if one.strip() else {} for one in packed]
    names = sorted({name for one in of_ranks for name in one})
    found = {name: [one[name] for one in of_ranks if name in one] for name in names}
    return {name: sum(one / len(values) for one in values) for name, values in found.items()}


def gather_packed(packed: bytes, world_size: int) -> list[bytes]:
    """Every rank's bytes, as many on each, in rank order."""
    if world_size == 1:
        return [packed]
    mine = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    return [one.numpy().tobytes() for one in gathered]


def _fold_samples(shares: Sequence[Contribution]) -> tuple[int, int]:
    by_index: dict[int, Contribution] = {}
    for rank, share in enumerate(shares):
        peer = by_index.setdefault(share.data_index, share)
        if (peer.samples, peer.sample_count) != (share.samples, share.sample_count):
            raise Disagreement(
                f"rank {rank} read other samples than its peer at data index {share.data_index}"
            )
    total = sum(share.samples for share in by_index.values()) % _SAMPLE_DIGEST_MODULUS
    return total, sum(share.sample_count for share in by_index.values())
