"""Which samples an evaluation reads: always the same ones, each once. Pure.

They are those of the documents that `data.validation` keeps from training: the token set of its
files, or the part of each source's set that its share holds out. Their order is that of one epoch
of all, without weights, with a seed and groups of its own, so that jobs that differ in theirs
evaluate the same samples. An evaluation that reads fewer samples than there are reads the first
ones; a node's cache holds all shards of their groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast_workers.data.corpus import CorpusError
from holdfast_workers.data.fetch_plan import KeptShards
from holdfast_workers.data.token_order import SourceShards, TokenOrder
from holdfast_workers.data.token_set import ShardFacts, TokenSet
from holdfast_workers.spec import DataSpec, PreparedSpec, TrainingSpec

VALIDATION_SEED = 0
SHUFFLE_GB = 1.0
"""In place of `data.shuffle_gb`."""


@dataclass(frozen=True)
class ValidationSets:
    """The documents of validation, as token sets."""

    data: DataSpec
    """The section as of a job that is trained on these documents."""
    sets: list[TokenSet]
    """One for each of `data.prepared`, of these documents alone."""
    manifests: list[TokenSet]
    """The sets that these are of."""

    @classmethod
    def of(cls, data: DataSpec, manifest: Callable[[PreparedSpec], TokenSet]) -> ValidationSets:
        """`manifest`: that of a set. Raises CorpusError if there are no documents."""
        apart = None if data.validation is None else data.validation.prepared
        if apart is not None:
            manifests = [manifest(apart)]
            found = [(apart, each) for each in manifests]
        else:
            manifests = [manifest(prepared) for prepared in data.prepared]
            found = [
                (prepared, replace(each, shards=each.held_out, held_out=()))
                for prepared, each in zip(data.prepared, manifests, strict=True)
                if each.held_out
            ]
        if not found:
            raise CorpusError(
                "evaluate reads the documents of data.validation, and the token sets have none: "
                "prepare the data again"
            )
        prepared = tuple(each for each, _ in found)
        own = {"prepared": prepared, "sources": (), "validation": None, "shuffle_gb": SHUFFLE_GB}
        return cls(data.model_copy(update=own), [each for _, each in found], manifests)

    def order(self, sequence_length: int) -> TokenOrder:
        """Raises ValueError if a set has too few tokens."""
        sizes = [SourceShards.of(each) for each in self.sets]
        return TokenOrder(sizes, None, sequence_length, VALIDATION_SEED, int(SHUFFLE_GB * 1e9))

    def kept(self, most_samples: int, sequence_length: int) -> KeptShards:
        """What a node's cache holds for an evaluation of so many samples."""
        read = self.read(most_samples, sequence_length)
        return KeptShards([shard for _, shard in read], self.manifests)

    def read(
        self, most_samples: int, sequence_length: int
    ) -> list[tuple[PreparedSpec, ShardFacts]]:
        """The distinct shards that an evaluation of so many samples reads, each with its set."""
        shards = [
            (prepared, shard)
            for prepared, each in zip(self.data.prepared, self.sets, strict=True)
            for shard in each.shards
        ]
        order = self.order(sequence_length)
        groups = order.groups_between(0, min(most_samples, order.samples))
        found = (shards[number] for group in groups for number in group.shards)
        return [*{shard.digest: (prepared, shard) for prepared, shard in found}.values()]


def read_sets(spec: TrainingSpec) -> list[PreparedSpec]:
    """The token sets that a run reads: those of its sources, and with evaluations that of the files
    of validation."""
    found, validation = [*spec.data.prepared], spec.data.validation
    if spec.evaluate.every_steps and validation is not None and validation.prepared is not None:
        found.append(validation.prepared)
    return found
