"""Digests that prove two states equal: xxh3-128, over exactly the bytes of a payload.

A shard digest covers one rank's payload, padding (always zero) included; it comes out the same
whether the payload lies in a buffer or is only implied by the live tensors. The digest of a step
covers the shard digests in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import xxhash

from holdfast_workers.state.layout import ALIGNMENT

PIECE_BYTES = 1 << 26
"""Read between two looks at whether to go on: some milliseconds."""

_PADDING = bytes(ALIGNMENT)


def payload_digest(payload: memoryview | bytes | bytearray) -> str:
    """Digest of a filled payload, in hex."""
    return str(xxhash.xxh3_128_hexdigest(payload))


def digest_unless(payload: memoryview, look: Callable[[], object]) -> str:
    """As `payload_digest`, for a reader that may have to stop: what `look` raises ends it."""
    state = xxhash.xxh3_128()
    for start in range(0, payload.nbytes, PIECE_BYTES):
        look()
        state.update(payload[start : start + PIECE_BYTES])
    return str(state.hexdigest())


def streamed_digest(pieces: Iterable[memoryview | bytes]) -> str:
    """Digest of the payload made of `pieces`, each padded with zeros to the alignment."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
        nbytes = piece.nbytes if isinstance(piece, memoryview) else len(piece)
        if rest := nbytes % ALIGNMENT:
            state.update(_PADDING[rest:])
    return str(state.hexdigest())


def step_digest(rank_digests: Sequence[str]) -> str:
    """Digest of the whole world's state, from its shard digests (hex) in rank order."""
    return str(xxhash.xxh3_128_hexdigest("".join(rank_digests).encode("ascii")))
