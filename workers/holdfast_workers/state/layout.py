"""The layout of one rank's training state in a flat buffer, shared by all tiers.

A payload is the concatenation of the rank's local tensors, each aligned to 64 bytes, and nothing
else: the small state (step, schedule, data position) is one uint8 tensor entry named
`SMALL_STATE`. The layout is written once per attempt; afterwards only bytes move. It holds
the global shape and box of every tensor, which suffices to load the bytes on any other mesh.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

ALIGNMENT = 64
KEPT_LAYOUTS = 64
MODEL_PREFIX = "model."
AVERAGES_PREFIX = "ema."
"""Of the moving averages of weights in the state of a built-in recipe; the weight's own name
follows."""
"""Prefix of the model's weights in the built-in recipes; the weight's own name follows. In a recipe
that does not say which of its tensors are weights, exactly the names with this prefix are."""
OBJECT_PREFIX = "object."
"""Prefix of a function's encoded objects, and of its optimizers' settings; their name follows."""
SMALL_STATE = "holdfast.small"
"""Name of the entry with the run's small state: JSON in UTF-8, padded with zeros to its size."""


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
    """True for an entry of this rank alone (its own bytes, small state), which is not resharded."""
    primary: bool = True
    """False if another rank holds the same box and writes it to the remote tier."""
    weight: bool = field(default=False, compare=False)
    """Whether it is a model's parameter or persistent buffer. It does not change what the bytes
    are, so it is not compared."""
    local: bool = False
    """True if each rank that holds the box has its own values in it (running statistics). It is
    saved of every rank; a rank of another mesh takes the values of the primary."""

    @property
    def is_local(self) -> bool:
        """Whether replicas may differ in it."""
        return self.local or (self.per_rank and self.name != SMALL_STATE)


@dataclass(frozen=True)
class StateLayout:
    tensors: tuple[TensorEntry, ...]
    payload_bytes: int

    @cached_property
    def shared_bytes(self) -> int:
        """The bytes before the first entry in which replicas may differ."""
        local = (entry.offset for entry in self.tensors if entry.is_local)
        return next(local, self.payload_bytes)

    def to_json(self) -> bytes:
        return self._json

    @cached_property
    def _json(self) -> bytes:
        # `asdict` would copy every value: 10 times slower, and agents send layouts in a pause.
        tensors = [vars(entry) for entry in self.tensors]
        fields = {"tensors": tensors, "payload_bytes": self.payload_bytes}
        return json.dumps(fields, separators=(",", ":")).encode()

    @staticmethod
    def from_json(text: bytes | str) -> StateLayout:
        """The layout of a JSON text. Equal texts give the same object while it is among the last
        `KEPT_LAYOUTS`: the ranks of a node read the same layouts. Raises ValueError, KeyError,
        TypeError."""
        return _parsed(text)


@lru_cache(KEPT_LAYOUTS)
def _parsed(text: bytes | str) -> StateLayout:
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
    return StateLayout(tensors=tensors, payload_bytes=fields["payload_bytes"])


def module_of(weight: str) -> str:
    """The name under which the weight's module is registered."""
    return weight.partition(".")[0]


def module_prefix(weights: Iterable[str]) -> str:
    """The prefix of the module's own names if the weights are of one module; "" if of several."""
    prefixes = {name[: name.find(".") + 1] for name in weights}
    return prefixes.pop() if len(prefixes) == 1 else ""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of a payload."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
