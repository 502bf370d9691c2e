"""Writes documents of tokens as shards of a token set."""

from __future__ import annotations

from array import array

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
        end = as_tokens(np.array([tokenizer.document_end]), tokenizer)
        self._type = end.dtype
        self._end = end.tobytes()
        self._most_bytes = shard_bytes
        self._tokens = bytearray()
        self._ends = array("Q")
        self._shards: list[ShardFacts] = []

    def add(self, document: Tokens) -> None:
        """Take a document without its end; may write a shard. Raises storage errors."""
        size = self._tokenizer.token_bytes
        filled = len(self._tokens) + self._ends.itemsize * len(self._ends)
        if filled and filled + (len(document) + 1) * size + self._ends.itemsize > self._most_bytes:
            self._write()
        self._tokens += document.tobytes()
        self._tokens += self._end
        self._ends.append(len(self._tokens) // size)

    def close(self) -> tuple[ShardFacts, ...]:
        """Write the last shard; return all in order."""
        if self._ends:
            self._write()
        return tuple(self._shards)

    def _write(self) -> None:
        tokens = as_tokens(np.frombuffer(self._tokens, self._type), self._tokenizer)
        content = ShardContent(tokens, np.frombuffer(self._ends, np.uint64))
        self._tokens, self._ends = bytearray(), array("Q")
        shard = encode_shard(content)
        facts = ShardFacts(shard_digest(shard), len(shard), len(content.tokens), len(content.ends))
        write_small(self._storage, facts.object_name, shard)
        self._shards.append(facts)
