"""Every step commits through a world-wide agreement: one all-gather of one small record per rank.

The record carries all values that every rank needs before the step may be applied: loss, gradient
norm, whether anything was not finite, the consumed samples, the digest of the state after the
previous step, the newest replicated step, a stop request, the save intervals, and whether a save to
the remote tier is under way. If a step has user metrics, a second all-gather exchanges them.

Folding the records is pure and in rank order, so ranks with the same records get the same result,
bit for bit. A record of another attempt or step makes the fold raise, so no rank applies the step.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
import torch.distributed as dist

from holdfast_workers.errors import WorkersError
from holdfast_workers.protocol.findings import TripReport
from holdfast_workers.protocol.metrics import FOLDS, Measured
from holdfast_workers.state.digest import step_digest
from holdfast_workers.state.replicas import ReplicaComparison

_SAMPLE_DIGEST_MODULUS = 1 << 64
Word = Annotated[int, "64 bits, unsigned"]
Part = TypeVar("Part")
_FORMATS: Mapping[Any, str] = {bool: "?", int: "q", Word: "Q", float: "d", bytes: "16s"}
"""The formats in a packed record, which contains the fields of these types as declared."""


class Disagreement(WorkersError):
    """Ranks are not at the same attempt and step, or replicas differ: nothing may commit."""


@dataclass(frozen=True)
class Contribution(Measured):
    """The values that a rank's recipe contributes to the agreement on one step.

    `loss_sum` over `count` targets, `grad_sq` and `samples` are shares of a whole: no two ranks
    contribute the same share. The exception is `samples`: all ranks of one `data_index`
    (tensor-parallel peers) read the same samples and contribute the same digest, which counts once.
    """

    loss_sum: float
    count: int
    grad_sq: float
    """Squared gradient norm of this rank's share; each global element counts on one rank only."""
    data_index: int
    samples: Word
    """64-bit digest of the samples read; see `sample_order.samples_digest`."""
    sample_count: int
    nonfinite: bool = False
    changed: bool = False
    """Whether this rank's parameters differ from those after the step before."""
    user_metrics: Mapping[str, float] = field(default_factory=dict)
    """The user's metrics by name; all values are finite."""
    data: Word = 0
    """64 bits of the fingerprint of the data, the same on all ranks; 0 without one."""


@dataclass(frozen=True)
class Record:
    """One rank's whole record: its contribution and the values that the loop adds."""

    attempt: int
    step: int
    contribution: Contribution
    state_step: int
    """The step that `state_digest` belongs to; -1 if there is none."""
    state_digest: bytes = bytes(16)
    replicated_step: int = -1
    stop: bool = False
    """Whether this rank received the request to stop after a step that all ranks agree on."""
    intervals: tuple[int, int] = (0, 0)
    """Steps between two saves to memory, and to the remote tier, as this rank received them."""
    compute_s: float = 0.0
    """Time that this rank spent on the step without waiting for peers, data or checkpoints."""
    user_metrics_bytes: int = 0
    """Size of the contribution's packed user metrics, which are not part of the record."""
    saving: bool = False
    """Whether an earlier state of this rank is still being saved to the remote tier."""
    leave: bool = False
    """Whether this rank received the request to leave the attempt, so that the mesh can change."""
    may_leave: bool = True
    """Whether this rank can keep the state after this step in memory without giving up a state that
    its partners do not hold yet."""
    shared_digest: bytes = bytes(16)
    """Digest of the part of the state that replicas share; `state_digest` if they share all of
    it."""

    def pack(self) -> bytes:
        share, own = _values_of_share(self.contribution), _values_of_loop(self)
        return _RECORD.pack(*share, *own, *self.intervals)

    @classmethod
    def unpack(cls, packed: bytes) -> Record:
        values = _RECORD.unpack(packed)
        share = _restored(Contribution, zip(_OF_SHARE, values, strict=False), user_metrics={})
        own = zip(_OF_LOOP, values[len(_OF_SHARE) :], strict=False)
        return _restored(cls, own, contribution=share, intervals=values[-2:])


def _packed(kind: type, *others: str) -> dict[str, str]:
    """The fields of a dataclass that a packed record contains, all but `others`, each with its
    format. Raises KeyError for a type that has none."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: _FORMATS[hint] for name, hint in hints.items() if name not in others}


def _restored(kind: type[Part], packed: Iterable[tuple[str, Any]], **other: Any) -> Part:
    """The value with these fields. The `__init__` of frozen dataclasses would double the time of
    `unpack`, which each rank does for all ranks in each step."""
    value = object.__new__(kind)
    value.__dict__.update(packed, **other)
    return value


_OF_SHARE = _packed(Contribution, "user_metrics")
_OF_LOOP = _packed(Record, "contribution", "intervals")
_values_of_share, _values_of_loop = attrgetter(*_OF_SHARE), attrgetter(*_OF_LOOP)
_RECORD = struct.Struct("".join(("<", *_OF_SHARE.values(), *_OF_LOOP.values(), "qq")))


@dataclass(frozen=True)
class Agreed(Measured):
    """The result of the agreement, equal on every rank."""

    attempt: int
    step: int
    loss: float
    """Mean over all targets of the step."""
    grad_norm: float
    nonfinite: bool
    samples: str
    """Digest of the consumed (position, sample) pairs; independent of the world size."""
    sample_count: int
    state_step: int
    """The step that `state_digest` belongs to; -1 if there is none."""
    state_digest: str | None
    rank_digests: tuple[str, ...]
    """For each rank, the digest of the part that it shares with its replicas."""
    replicated_step: int
    """The newest step whose state every rank knows to be replicated; -1 for none."""
    stop: bool = False
    """Whether any rank received a stop request: this step is then the last, on every rank."""
    leave: bool = False
    """Whether any rank received the request to leave the attempt, and all may: this step is then
    the last of the attempt, on every rank."""
    intervals: tuple[int, int] = (0, 0)
    """The save intervals that rank 0 received; they apply to all ranks from this step on."""
    saving: bool = False
    """Whether any rank still saves an earlier state to the remote tier."""
    compute_s: tuple[float, ...] = ()
    """Time that each rank spent on the step without waiting, by rank."""
    trip: TripReport | None = None
    """The trip of a guard on this step, if any."""
    user_metrics_bytes: int = 0
    """The largest size of any rank's packed user metrics; if it is not 0, they are gathered."""
    user_metrics: dict[str, float] = field(default_factory=dict)
    """The user's metrics: means over the ranks that contribute them."""


def fold(records: Sequence[Record], replicas: ReplicaComparison | None = None) -> Agreed:
    """The agreement on a step, from all records in rank order. Pure.

    Raises Disagreement if the records are not all of one attempt and step, if their state digests
    are of different steps, or if ranks have different data or peers read different samples. Raises
    CorruptionFound if ranks that `replicas` compares do not hold the same state.
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
                f"rank {rank} has a state digest of step {record.state_step}; "
                f"rank 0 of step {first.state_step}"
            )
        if record.contribution.data != first.contribution.data:
            raise Disagreement(
                f"rank {rank} has other data than rank 0: make data.source the same on every node"
            )
    shares = [record.contribution for record in records]
    digests = tuple(record.state_digest.hex() for record in records)
    shared = tuple(record.shared_digest.hex() for record in records)
    has_digests = first.state_step >= 0
    if replicas is not None:
        changed = [share.changed for share in shares]
        replicas.check(first.attempt, first.step - 1, shared if has_digests else (), changed)
    samples, sample_count = _fold_samples(shares)
    loss_sum, count, grad_sq = 0.0, 0, 0.0
    for share in shares:
        loss_sum += share.loss_sum
        count += share.count
        grad_sq += share.grad_sq
    nonfinite = any(share.nonfinite for share in shares) or not (
        math.isfinite(loss_sum) and math.isfinite(grad_sq)
    )
    measured: dict[str, Any] = {
        name: value_of_step(map(attrgetter(name), shares)) for name, value_of_step in FOLDS.items()
    }
    return Agreed(
        attempt=first.attempt,
        step=first.step,
        loss=loss_sum / count if count else math.nan,
        grad_norm=math.sqrt(grad_sq) if grad_sq >= 0 else math.nan,
        nonfinite=nonfinite,
        samples=f"{samples:016x}",
        sample_count=sample_count,
        state_step=first.state_step,
        state_digest=step_digest(digests) if has_digests else None,
        rank_digests=shared if has_digests else (),
        replicated_step=min(record.replicated_step for record in records),
        stop=any(record.stop for record in records),
        leave=any(record.leave for record in records)
        and all(record.may_leave for record in records),
        intervals=first.intervals,
        saving=any(record.saving for record in records),
        compute_s=tuple(record.compute_s for record in records),
        user_metrics_bytes=max(record.user_metrics_bytes for record in records),
        **measured,
    )


def gather(record: Record, world_size: int) -> list[Record]:
    """Every rank's record, in rank order. One collective; none in a world of one rank."""
    return [Record.unpack(packed) for packed in gather_bytes(record.pack(), world_size)]


def pack_user_metrics(user_metrics: Mapping[str, float]) -> bytes:
    """The user's metrics as bytes; no bytes for no metrics."""
    return json.dumps(user_metrics, separators=(",", ":")).encode() if user_metrics else b""


def mean_user_metrics(
    user_metrics: Mapping[str, float], max_bytes: int, world_size: int
) -> dict[str, float]:
    """`fold_user_metrics` over all ranks. One collective; `max_bytes`: the largest packed size."""
    return fold_user_metrics(
        gather_bytes(pack_user_metrics(user_metrics).ljust(max_bytes), world_size)
    )


def fold_user_metrics(packed: Sequence[bytes]) -> dict[str, float]:
    """The mean of each metric over the ranks that contribute it. Pure, like `fold`."""
    by_rank = [json.loads(raw) if raw.strip() else {} for raw in packed]
    names = sorted({name for metrics in by_rank for name in metrics})
    values = {name: [metrics[name] for metrics in by_rank if name in metrics] for name in names}
    return {name: sum(value / len(given) for value in given) for name, given in values.items()}


def gather_bytes(packed: bytes, world_size: int) -> list[bytes]:
    """Every rank's bytes in rank order; the length is the same on all ranks."""
    if world_size == 1:
        return [packed]
    own = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(gathered, own)
    return [tensor.numpy().tobytes() for tensor in gathered]


def _fold_samples(shares: Sequence[Contribution]) -> tuple[int, int]:
    by_index: dict[int, Contribution] = {}
    for rank, share in enumerate(shares):
        peer = by_index.setdefault(share.data_index, share)
        if (peer.samples, peer.sample_count) != (share.samples, share.sample_count):
            raise Disagreement(
                f"rank {rank} read other samples than its peer with data index {share.data_index}"
            )
    total = sum(share.samples for share in by_index.values()) % _SAMPLE_DIGEST_MODULUS
    return total, sum(share.sample_count for share in by_index.values())
