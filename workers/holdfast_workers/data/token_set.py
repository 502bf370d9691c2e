"""What a token set consists of: shards of token ids, and the manifest that vouches for them.

A set is a folder of objects named by its content's origin; the manifest is written last, so that a
set without one does not exist. A shard is one object:

    header (32 bytes) | token ids, padded to 8 bytes | ends of the documents (uint64)

An end is the number of the shard's tokens up to and with the last one of the document; each
document ends with the token `document_end`. The ids are uint16 where the vocabulary allows it, and
uint32 otherwise; all numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast_workers.errors import WorkersError

MANIFEST = "manifest.json"
SHARD_MAGIC = b"HFTOKENS"
FORMAT = 1
_HEADER = struct.Struct("<8sIIQQ")
"""Magic, format, bytes of a token, tokens, documents."""
_ALIGNMENT = 8

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


class BadTokenSet(WorkersError):
    """A manifest or a shard is damaged, or is not the one that was asked for."""


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer, as far as the tokens depend on it."""

    name: str
    """As the spec names it: `bytes`, or a path."""
    digest: str
    """Of the tokenizer's file; of `bytes`, its name."""
    vocabulary: int
    """One more than the largest id."""
    document_end: int
    """The id after each document."""
    library: str = ""
    """Version of `tokenizers`; "" for `bytes`."""

    @property
    def token_bytes(self) -> int:
        return 2 if self.vocabulary <= 1 << 16 else 4


@dataclass(frozen=True)
class ShardFacts:
    """A shard; its object in the set's folder is named by its digest."""

    digest: str
    """xxh3_128 of the whole object."""
    nbytes: int
    tokens: int
    documents: int

    @property
    def object_name(self) -> str:
        return f"{self.digest}.tokens"


@dataclass(frozen=True)
class BadRecord:
    """A record that was left out."""

    file: str
    row: int
    """Of the file, from 1; 0: the whole file."""
    why: str


@dataclass(frozen=True)
class TokenSet:
    """The manifest of one source's token set."""

    source: str
    """The source's path, as the spec names it."""
    text: str
    """The column with the text; "": files of text."""
    tokenizer: TokenizerFacts
    shards: tuple[ShardFacts, ...]
    """In the order of the source's files and their records."""
    files: int
    source_bytes: int
    bad_count: int = 0
    bad: tuple[BadRecord, ...] = ()
    """The first ones that were left out."""
    held_out: tuple[ShardFacts, ...] = ()
    """Documents that are kept from training; `tokens`, `documents` and `nbytes` leave them out."""

    @property
    def all_shards(self) -> tuple[ShardFacts, ...]:
        return self.shards + self.held_out

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def samples(self, sequence_length: int) -> int:
        """Of an epoch, in samples of `sequence_length` targets: see `TokenOrder`."""
        return sum(-(-(shard.tokens - 1) // sequence_length) for shard in self.shards)

    @property
    def digest(self) -> str:
        """Of the tokens alone: equal for equal documents, wherever their files were."""
        tokens = f"{FORMAT}/{self.tokenizer.digest}/{self.tokenizer.document_end}"
        parts = [tokens, *(s.digest for s in self.shards)]
        if self.held_out:
            parts += ["", *(s.digest for s in self.held_out)]
        return shard_digest("/".join(parts).encode())

    def encode(self) -> bytes:
        """The manifest as JSON, with its own digest."""
        document = asdict(self)
        return json.dumps({"format": FORMAT, "digest": _sum_of(document), "set": document}).encode()

    @classmethod
    def decode(cls, content: bytes, where: str) -> TokenSet:
        """Raises BadTokenSet; `where`: its place, for the error."""
        try:
            sealed = json.loads(content)
            if sealed["format"] != FORMAT:
                raise BadTokenSet(
                    f"{where} has the format {sealed['format']}, and this version reads {FORMAT}: "
                    "prepare the data again"
                )
            document = sealed["set"]
            if _sum_of(document) == sealed["digest"]:
                return cls._of(document)
        except (ValueError, KeyError, TypeError) as error:
            raise BadTokenSet(f"{where} is damaged: {error}") from error
        raise BadTokenSet(f"{where} is damaged: it does not match its own digest")

    @classmethod
    def _of(cls, document: Mapping[str, Any]) -> TokenSet:
        return cls(
            **{
                **document,
                "tokenizer": TokenizerFacts(**document["tokenizer"]),
                "shards": tuple(ShardFacts(**shard) for shard in document["shards"]),
                "bad": tuple(BadRecord(**record) for record in document["bad"]),
                "held_out": tuple(ShardFacts(**shard) for shard in document.get("held_out", ())),
            }
        )


@dataclass(frozen=True)
class ShardContent:
    """The arrays of a shard, which may be mapped from a file."""

    tokens: Tokens
    ends: NDArray[np.uint64]
    """(documents,); see the module."""


def encode_shard(content: ShardContent) -> bytes:
    """The object of a shard."""
    tokens, ends = content.tokens, content.ends
    size = tokens.dtype.itemsize
    header = _HEADER.pack(SHARD_MAGIC, FORMAT, size, len(tokens), len(ends))
    padding = bytes(-len(tokens) * size % _ALIGNMENT)
    return b"".join(
        [
            header,
            tokens.astype(f"<u{size}", copy=False).tobytes(),
            padding,
            ends.astype("<u8", copy=False).tobytes(),
        ]
    )


def read_shard(buffer: memoryview | bytes, where: str) -> ShardContent:
    """The arrays of a shard's bytes, without a copy. Raises BadTokenSet; `where`: its place, for
    the error. Only its form is checked: see `ShardFacts.digest`."""
    try:
        magic, form, size, tokens, documents = _HEADER.unpack_from(buffer)
    except struct.error as error:
        raise BadTokenSet(f"{where} is no shard of tokens: it is too short") from error
    if magic != SHARD_MAGIC or form != FORMAT or size not in (2, 4):
        raise BadTokenSet(f"{where} is no shard of tokens of format {FORMAT}")
    ends_at = _HEADER.size + tokens * size + -tokens * size % _ALIGNMENT
    if len(buffer) != ends_at + documents * 8:
        raise BadTokenSet(f"{where} has {len(buffer)} bytes, not {ends_at + documents * 8}")
    return ShardContent(
        np.frombuffer(buffer, f"<u{size}", tokens, _HEADER.size),
        np.frombuffer(buffer, "<u8", documents, ends_at),
    )


def shard_digest(content: bytes | memoryview) -> str:
    return str(xxhash.xxh3_128(content).hexdigest())


def _sum_of(document: Mapping[str, Any]) -> str:
    return shard_digest(json.dumps(document, sort_keys=True).encode())
