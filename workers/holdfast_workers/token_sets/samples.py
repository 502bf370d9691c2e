"""The first samples of prepared sources as text, for people: what a model will see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.data.token_corpus import order_of
from holdfast_workers.data.token_set import (
    BadTokenSet,
    ShardContent,
    ShardFacts,
    read_shard,
    shard_digest,
)
from holdfast_workers.spec import DataSpec
from holdfast_workers.token_sets.prepare import read_set
from holdfast_workers.token_sets.refusals import DataRefused
from holdfast_workers.token_sets.tokenizer_file import Encoder, read_tokenizer


@dataclass(frozen=True)
class TextSample:
    position: int
    """In the order of training, from 0."""
    source: str
    tokens: int
    text: str


def first_samples(
    data: DataSpec,
    sequence_length: int,
    seed: int,
    count: int,
    open_set: Callable[[str], Storage],
) -> list[TextSample]:
    """The samples at the first `count` positions; reads the shards that they are in. Raises
    DataRefused, BadTokenSet, StorageError."""
    storages = [open_set(prepared.uri) for prepared in data.prepared]
    sets = [
        read_set(storage, prepared.digest)
        for storage, prepared in zip(storages, data.prepared, strict=True)
    ]
    tokenizer = read_tokenizer(data)
    if tokenizer.facts.digest != sets[0].tokenizer.digest:
        raise DataRefused(
            f"the tokenizer {data.tokenizer} has changed since the data was prepared: prepare it "
            "again"
        )
    encoder = Encoder(tokenizer)
    order = order_of(data, sets, sequence_length, seed)
    positions = np.arange(count, dtype=np.int64)
    samples = order.samples_at(positions)
    shards, starts = order.windows_of(samples)
    facts = [(shard, place) for place, each in enumerate(sets) for shard in each.shards]
    found, read = [], dict[str, ShardContent]()
    for position, number, start, targets in zip(
        positions.tolist(),
        shards.tolist(),
        starts.tolist(),
        order.targets_of(samples).tolist(),
        strict=True,
    ):
        shard, place = facts[number]
        if shard.digest not in read:
            read[shard.digest] = read_shard(_read(storages[place], shard), shard.object_name)
        ids = read[shard.digest].tokens[start : start + targets + 1]
        path = data.sources[place].path
        found.append(TextSample(position, path, len(ids), encoder.decode(ids)))
    return found


def _read(storage: Storage, shard: ShardFacts) -> bytes:
    """Raises BadTokenSet, StorageError."""
    content = storage.read(shard.object_name)
    if shard_digest(content) != shard.digest:
        raise BadTokenSet(
            f"{storage.uri}/{shard.object_name} is damaged: delete the folder, and prepare again"
        )
    return content
