"""Digests that prove two states equal: xxh3-128 over exactly the bytes of a payload.

A shard digest covers one rank's payload, including its padding, which is always zero. It is the
same whether computed from a payload in a buffer or from the live tensors. The digest of a step
covers the shard digests in rank order. Replicas may differ at the end of their payloads
(`StateLayout.shared_bytes`), so a second digest covers what is before; one pass computes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import xxhash

from holdfast_workers.state.layout import ALIGNMENT, StateLayout

PIECE_BYTES = 1 << 26
"""Bytes that are hashed between two checks whether to stop, in some milliseconds."""

_PADDING = bytes(ALIGNMENT)


@dataclass(frozen=True)
class ShardDigest:
    """The digests of one rank's payload, in hex."""

    whole: str
    shared: str
    """Digest of the part that replicas share; `whole` if they share all of it."""

    @classmethod
    def of_payload(cls, payload: memoryview, layout: StateLayout, whole: str) -> ShardDigest:
        """The digests of a payload whose own digest is known."""
        if layout.shared_bytes == layout.payload_bytes:
            return cls(whole, whole)
        return cls(whole, payload_digest(payload[: layout.shared_bytes]))


class ShardHasher:
    """Computes both digests from the pieces of a payload, in their order. No piece may cross the
    end of the shared part."""

    def __init__(self, shared_bytes: int) -> None:
        self._state = xxhash.xxh3_128()
        self._until_shared = shared_bytes
        self._shared = self._state.hexdigest()

    def update(self, piece: memoryview | bytes) -> None:
        self._state.update(piece)
        if self._until_shared > 0:
            self._until_shared -= piece.nbytes if isinstance(piece, memoryview) else len(piece)
            if self._until_shared == 0:
                self._shared = self._state.hexdigest()

    def digest(self) -> ShardDigest:
        return ShardDigest(str(self._state.hexdigest()), str(self._shared))


def payload_digest(payload: memoryview | bytes | bytearray) -> str:
    """Digest of a filled payload, in hex."""
    return str(xxhash.xxh3_128_hexdigest(payload))


def interruptible_digest(payload: memoryview, check_stop: Callable[[], object]) -> str:
    """The digest like `payload_digest`, which calls `check_stop` between pieces; its exception ends
    the computation."""
    state = xxhash.xxh3_128()
    for start in range(0, payload.nbytes, PIECE_BYTES):
        check_stop()
        state.update(payload[start : start + PIECE_BYTES])
    return str(state.hexdigest())


def streamed_digest(pieces: Iterable[memoryview | bytes], shared_bytes: int) -> ShardDigest:
    """Digest of the payload that consists of `pieces`, each padded with zeros to the alignment."""
    hasher = ShardHasher(shared_bytes)
    for piece in pieces:
        hasher.update(piece)
        nbytes = piece.nbytes if isinstance(piece, memoryview) else len(piece)
        if rest := nbytes % ALIGNMENT:
            hasher.update(_PADDING[rest:])
    return hasher.digest()


def step_digest(rank_digests: Sequence[str]) -> str:
    """Digest of the whole world's state, from its shard digests in hex and in rank order."""
    return str(xxhash.xxh3_128_hexdigest("".join(rank_digests).encode("ascii")))
