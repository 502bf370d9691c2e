"""Token sets made by hand: of bytes, one document a shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.storage import Storage, write_small
from holdfast_workers.data.token_cache import manifest_file, shard_file
from holdfast_workers.data.token_set import (
    MANIFEST,
    ShardContent,
    ShardFacts,
    TokenizerFacts,
    Tokens,
    TokenSet,
    encode_shard,
    shard_digest,
)
from holdfast_workers.private_files import write_private
from holdfast_workers.spec import PreparedSpec

BYTES = TokenizerFacts(name="bytes", digest="b" * 32, vocabulary=256, document_end=0)


class MadeSet:
    """A token set whose shards have these tokens."""

    def __init__(
        self,
        source: str,
        shards: Sequence[Sequence[int]],
        tokenizer: TokenizerFacts = BYTES,
        held_out: Sequence[Sequence[int]] = (),
    ) -> None:
        contents = [_encoded(tokens, tokenizer) for tokens in (*shards, *held_out)]
        facts = [
            ShardFacts(shard_digest(content), len(content), len(tokens), 1)
            for content, tokens in zip(contents, (*shards, *held_out), strict=True)
        ]
        own, others = tuple(facts[: len(shards)]), tuple(facts[len(shards) :])
        nbytes = sum(map(len, contents))
        self.facts = TokenSet(source, "text", tokenizer, own, 1, nbytes, held_out=others)
        self.contents = dict(zip(facts, contents, strict=True))

    @property
    def shards(self) -> tuple[ShardFacts, ...]:
        return self.facts.shards

    def prepared(self, uri: Path | str = "/store") -> PreparedSpec:
        facts = self.facts
        return PreparedSpec(
            uri=str(uri),
            origin=facts.source,
            digest=facts.digest,
            vocabulary=facts.tokenizer.vocabulary,
            tokens=facts.tokens,
            held_out=sum(shard.tokens for shard in facts.held_out),
        )

    def store(self, folder: Path) -> PreparedSpec:
        """Write the objects of the set, below the folder."""
        self.write_to(LocalStorage(folder))
        return self.prepared(folder)

    def write_to(self, storage: Storage) -> None:
        for shard, content in self.contents.items():
            write_small(storage, shard.object_name, content)
        write_small(storage, MANIFEST, self.facts.encode())

    def put_into_cache(self, cache_dir: Path) -> PreparedSpec:
        """As if the set had been fetched: also while others read its files."""
        cache_dir.mkdir(exist_ok=True)
        for shard, content in self.contents.items():
            write_private(shard_file(cache_dir, shard), content)
        write_private(manifest_file(cache_dir, self.prepared()), self.facts.encode())
        return self.prepared()


def random_shards(seed: int, sizes: Sequence[int], vocabulary: int = 256) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, size).tolist() for size in sizes]


def _encoded(tokens: Sequence[int], tokenizer: TokenizerFacts) -> bytes:
    array: Tokens = np.array(tokens, dtype=np.uint32)
    if tokenizer.token_bytes == 2:
        array = array.astype(np.uint16)
    return encode_shard(ShardContent(array, np.array([len(tokens)], dtype=np.uint64)))
