"""The record of a finished part, beside the shards of an unfinished set."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from holdfast_workers.data.token_set import BadRecord, BadTokenSet, ShardFacts, shard_digest

FOLDER = "parts"


@dataclass(frozen=True)
class PartResult:
    index: int
    shards: tuple[ShardFacts, ...]
    records: int
    """All of them, the unusable ones included."""
    bad_count: int
    bad: tuple[BadRecord, ...]
    """The first ones."""
    source_bytes: int
    held_out: tuple[ShardFacts, ...] = ()
    """Shards of the documents that are kept from training."""

    def encode(self, key: str) -> bytes:
        """As JSON with its own digest; `key`: that of the plan."""
        document = {"key": key, "result": asdict(self)}
        return json.dumps({"digest": _sum_of(document), **document}).encode()

    @classmethod
    def decode(cls, content: bytes, key: str) -> PartResult:
        """Raises BadTokenSet."""
        try:
            sealed = json.loads(content)
            document = {"key": sealed["key"], "result": sealed["result"]}
            if sealed["digest"] == _sum_of(document) and sealed["key"] == key:
                return cls._of(sealed["result"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadTokenSet(f"the record of a part is damaged: {error}") from error
        raise BadTokenSet("the record of a part does not match its digest, or is of another plan")

    @classmethod
    def _of(cls, result: dict[str, Any]) -> PartResult:
        shards = tuple(ShardFacts(**shard) for shard in result["shards"])
        bad = tuple(BadRecord(**record) for record in result["bad"])
        held_out = tuple(ShardFacts(**shard) for shard in result.get("held_out", ()))
        return cls(**{**result, "shards": shards, "bad": bad, "held_out": held_out})


def object_name(index: int) -> str:
    return f"{FOLDER}/{index:08d}.json"


def _sum_of(document: dict[str, Any]) -> str:
    return shard_digest(json.dumps(document, sort_keys=True).encode())
