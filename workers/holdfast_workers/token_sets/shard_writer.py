"""Writes documents of tokens as shards of a token set."""

from __future__ import annotations

import numpy as np

from holdfast_workers.checkpoint.storage import Storage, write_small
from holdfast_workers.data.token_set import (
    ShardContent,
    ShardFacts,
    TokenizerFacts,
    Tokens,
    encode_shard,
    shard_digest,
)
from holdfast_workers.token_sets.tokenizer_file import as_tokens


class ShardWriter:
    """Collects documents in order; a document is never divided.

    Memory: four times the shard, or its longest document.
    """

    def __init__(self, storage: Storage, tokenizer: TokenizerFacts, shard_bytes: int) -> None:
        self._storage = storage
        self._tokenizer = tokenizer
        self._end = as_tokens(np.array([tokenizer.document_end]), tokenizer)
        self._most_tokens = shard_bytes // tokenizer.token_bytes
        self._pieces: list[Tokens] = []
        self._ends: list[int] = []
        self._shards: list[ShardFacts] = []

    def add(self, document: Tokens) -> None:
        """Take a document without its end; may write a shard. Raises storage errors."""
        tokens = len(document) + 1
        filled = self._ends[-1] if self._ends else 0
        if filled and filled + tokens > self._most_tokens:
            self._write()
            filled = 0
        self._pieces += [document, self._end]
        self._ends.append(filled + tokens)

    def close(self) -> tuple[ShardFacts, ...]:
        """Write the last shard; return all in order."""
        if self._ends:
            self._write()
        return tuple(self._shards)

    def _write(self) -> None:
        tokens = as_tokens(np.concatenate(self._pieces), self._tokenizer)
        content = ShardContent(tokens, np.array(self._ends, np.uint64))
        self._pieces, self._ends = [], []
        shard = encode_shard(content)
        facts = ShardFacts(shard_digest(shard), len(shard), len(content.tokens), len(content.ends))
        write_small(self._storage, facts.object_name, shard)
        self._shards.append(facts)
