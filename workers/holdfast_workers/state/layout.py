"""How one rank's training state lies in a flat buffer: the layout shared by all tiers.

A payload is the concatenation of the rank's local tensors, each aligned to 64 bytes, followed by
nothing: small state (step, schedule, data position) rides as one uint8 tensor entry named
`SMALL_STATE`. The layout is written once per attempt; afterwards only bytes move. It holds
enough (global shape and box of every tensor) to load the bytes on any other mesh.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

ALIGNMENT = 64
MODEL_PREFIX = "model."
"""How the names of the model's parameters begin, in every recipe's state; what follows is the
parameter's own name. Whatever else a state holds (moments, bytes of a rank) is named otherwise."""
SMALL_STATE = "holdfast.small"
"""Entry with the run's small state: JSON in UTF-8, padded with zero bytes to its capacity."""


@dataclass(frozen=True)
class TensorEntry:
    """One local tensor: the box `offsets + [0, shape)` of a global tensor, at `offset` bytes."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    per_rank: bool = False
    """True for what belongs to this rank alone (bytes of its own, small state): not resharded."""
    primary: bool = True
    """False where another rank holds the very same box and writes it to the remote tier."""


@dataclass(frozen=True)
class StateLayout:
    tensors: tuple[TensorEntry, ...]
    payload_bytes: int

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> StateLayout:
        fields = json.loads(text)
        tensors = tuple(
            TensorEntry(
                **{
                    **entry,
                    "global_shape": tuple(entry["global_shape"]),
                    "offsets": tuple(entry["offsets"]),
                    "shape": tuple(entry["shape"]),
                }
            )
            for entry in fields["tensors"]
        )
        return cls(tensors=tensors, payload_bytes=fields["payload_bytes"])


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of a payload."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
