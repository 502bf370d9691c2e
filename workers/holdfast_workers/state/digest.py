"""Digests that prove two states equal: xxh3-128 over exactly the bytes of a payload.

A shard digest covers one rank's payload, including its padding, which is always zero. It is the
same whether computed from a payload in a buffer or from the live tensors. The digest of a step
covers the shard digests in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import xxhash

from holdfast_workers.state.layout import ALIGNMENT

PIECE_BYTES = 1 << 26
"""Hashed between two checks whether to stop: some milliseconds."""

_PADDING = bytes(ALIGNMENT)


def payload_digest(payload: memoryview | bytes | bytearray) -> str:
    """Digest of a filled payload, in hex."""
    return str(xxhash.xxh3_128_hexdigest(payload))


def interruptible_digest(payload: memoryview, check_stop: Callable[[], object]) -> str:
    """As `payload_digest`, but calls `check_stop` between pieces; its exception ends the digest."""
    state = xxhash.xxh3_128()
    for start in range(0, payload.nbytes, PIECE_BYTES):
        check_stop()
        state.update(payload[start : start + PIECE_BYTES])
    return str(state.hexdigest())


def streamed_digest(pieces: Iterable[memoryview | bytes]) -> str:
    """Digest of the payload that consists of `pieces`, each padded with zeros to the alignment."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
        nbytes = piece.nbytes if isinstance(piece, memoryview) else len(piece)
        if rest := nbytes % ALIGNMENT:
            state.update(_PADDING[rest:])
    return str(state.hexdigest())


def step_digest(rank_digests: Sequence[str]) -> str:
    """Digest of the whole world's state, from its shard digests in hex and in rank order."""
    return str(xxhash.xxh3_128_hexdigest("".join(rank_digests).encode("ascii")))
