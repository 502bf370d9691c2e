"""The agreement on an evaluation: one all-gather of a small record per rank, folded in rank order.

An evaluation follows the step that it is of, before the step's row is sent and its state is saved:
its result is committed if the row is. So a fault in the middle repeats both, and nothing else needs
to be kept. The state does not depend on it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from holdfast_workers.training.step_agreement import Disagreement, gather_bytes

LOSS, PERPLEXITY = "eval_loss", "eval_perplexity"
OWN_METRICS = "eval_{}"
"""The names of the metrics of a user's function."""
EVALUATION_PHASE = "evaluation"
"""The phase of a rank that evaluates; its micro-batches are the passes."""
_MODULUS = 1 << 64
_RECORD = struct.Struct("<qqdqqQqQq")


class MetricsDiffer(Exception):
    """The user's function has returned other metrics on some ranks."""


@dataclass(frozen=True)
class EvaluationShare:
    """The values that a rank contributes. `loss_sum` over `count` targets is its share of a whole;
    ranks of one `data_index` read the same samples."""

    loss_sum: float
    count: int
    data_index: int
    samples: int
    """64-bit digest of the (position, sample) pairs read; see `sample_order.samples_digest`."""
    targets: int
    """Of all samples of an evaluation: what the counts of all ranks add up to."""
    documents: int
    """64 bits of the fingerprint of the documents, the same on all ranks."""
    sums: Mapping[str, float] | None = None
    """By metric, the sum of a user's function over those targets; None on a rank that does not
    know the outputs, and without a function."""


@dataclass(frozen=True)
class EvaluationRecord:
    """What a rank sends: its share, and what it is of."""

    attempt: int
    step: int
    share: EvaluationShare
    """Without its sums."""
    sums_bytes: int = 0
    """The length of its packed sums, which follow."""

    def pack(self) -> bytes:
        share = astuple(replace(self.share, sums=None))[:-1]
        return _RECORD.pack(self.attempt, self.step, *share, self.sums_bytes)

    @classmethod
    def unpack(cls, packed: bytes) -> EvaluationRecord:
        attempt, step, *share, sums_bytes = _RECORD.unpack(packed)
        return cls(attempt, step, EvaluationShare(*share), sums_bytes)


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation, equal on every rank."""

    loss: float
    """Mean over all targets of the samples."""
    samples: str
    """Digest of the (position, sample) pairs; independent of the world size."""
    own: Mapping[str, float] = field(default_factory=dict)
    """Mean over all targets of each sum of a user's function."""

    @property
    def metrics(self) -> dict[str, float]:
        """By name, as far as they are finite."""
        return {name: value for name, value in self._values.items() if math.isfinite(value)}

    @property
    def not_finite(self) -> list[str]:
        """The names of those that are not."""
        return [name for name, value in self._values.items() if not math.isfinite(value)]

    @property
    def _values(self) -> dict[str, float]:
        perplexity = math.exp(self.loss) if self.loss < _LARGEST else self.loss * math.inf
        return {LOSS: self.loss, PERPLEXITY: perplexity, **self.own}


_LARGEST = 700.0
"""A loss whose perplexity is not finite any more."""


def agree_on_evaluation(
    share: EvaluationShare, attempt: int, step: int, world_size: int
) -> Evaluated:
    """The result of all ranks. One collective, and one more with a user's function; none in a world
    of one rank. Raises Disagreement and MetricsDiffer."""
    sums = b"" if share.sums is None else json.dumps(dict(share.sums)).encode()
    packed = EvaluationRecord(attempt, step, share, len(sums)).pack()
    records = [EvaluationRecord.unpack(each) for each in gather_bytes(packed, world_size)]
    found = fold_evaluation(records)
    longest = max(record.sums_bytes for record in records)
    if not longest:
        return found
    gathered = gather_bytes(sums.ljust(longest), world_size)
    return replace(found, own=fold_sums(gathered, records[0].share.targets))


def fold_evaluation(records: Sequence[EvaluationRecord]) -> Evaluated:
    """The result, from all records in rank order. Pure.

    Raises Disagreement if the records are not all of one attempt and step, if ranks have other
    documents, if peers read different samples, or if the ranks have not read each target once.
    """
    first = records[0]
    by_index: dict[int, EvaluationShare] = {}
    loss_sum, count = 0.0, 0
    for rank, record in enumerate(records):
        share = record.share
        if (record.attempt, record.step) != (first.attempt, first.step):
            raise Disagreement(
                f"rank {rank} evaluates step {record.step} of attempt {record.attempt}; rank 0 "
                f"step {first.step} of attempt {first.attempt}"
            )
        if (share.documents, share.targets) != (first.share.documents, first.share.targets):
            raise Disagreement(
                f"rank {rank} evaluates other documents than rank 0: prepare data.validation again"
            )
        if by_index.setdefault(share.data_index, share).samples != share.samples:
            raise Disagreement(
                f"rank {rank} evaluated other samples than its peer with data index "
                f"{share.data_index}"
            )
        loss_sum += share.loss_sum
        count += share.count
    if count != first.share.targets:
        raise Disagreement(
            f"the ranks evaluated {count} targets, and the samples have {first.share.targets}"
        )
    samples = sum(share.samples for share in by_index.values()) % _MODULUS
    return Evaluated(loss_sum / count if count else math.nan, f"{samples:016x}")


def fold_sums(packed: Sequence[bytes], targets: int) -> dict[str, float]:
    """The mean over `targets` of each sum, from the packed sums of all ranks in rank order; blank
    of a rank that has none. Pure. Raises MetricsDiffer."""
    by_rank = {rank: json.loads(raw) for rank, raw in enumerate(packed) if raw.strip()}
    first, *_ = by_rank
    totals = dict.fromkeys(by_rank[first], 0.0)
    for rank, sums in by_rank.items():
        if sums.keys() != totals.keys():
            raise MetricsDiffer(
                f"the function of evaluate returned {sorted(sums)} on rank {rank}, and "
                f"{sorted(totals)} on rank {first}: it must return the same names everywhere"
            )
        for name, value in sums.items():
            totals[name] += value
    return {name: value / targets if targets else math.nan for name, value in totals.items()}
