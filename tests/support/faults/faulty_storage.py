"""An in-memory bucket that records every state it passes through.

A crash leaves what an object store would leave: an object is complete or absent, and a removal of
many objects may have removed any subset of them.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.faults.crash_states import Files, Moment

from holdfast_workers.checkpoint.storage import ObjectExists, ObjectFacts, ObjectMissing
from holdfast_workers.data.token_set import shard_digest

REMOVALS = 4


@dataclass
class Bucket:
    """The objects, and the recorded history of their states."""

    objects: Files = field(default_factory=dict)
    must_hold: frozenset[Any] = frozenset()
    moments: list[Moment] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)
    """Objects being written: invisible to readers, and left behind by a crash."""
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def now_holds(self, *what: Any) -> None:
        self.must_hold = frozenset(what)
        self.record("driver")

    def record(self, operation: str, objects: Files | None = None) -> None:
        files = dict(self.objects if objects is None else objects)
        if not self.moments or self.moments[-1].files != files:
            self.moments.append(Moment(files, operation, self.must_hold))


@dataclass
class MemoryStorage:
    """The `Storage` interface over a `Bucket`."""

    bucket: Bucket
    prefix: str = ""

    @property
    def uri(self) -> str:
        return f"memory://{self.prefix}".rstrip("/")

    def below(self, folder: str) -> MemoryStorage:
        return MemoryStorage(self.bucket, f"{self.prefix}{folder}/")

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[io.BytesIO]:
        stream = io.BytesIO()
        self.bucket.unfinished.add(self.prefix + name)
        try:
            yield stream
            self.bucket.objects[self.prefix + name] = stream.getvalue()
            self.bucket.record(f"write of {name}")
        finally:
            self.bucket.unfinished.discard(self.prefix + name)

    def put_new(self, name: str, content: bytes) -> None:
        if self.prefix + name in self.bucket.objects:
            raise ObjectExists(f"{self.uri}/{name}")
        self.bucket.objects[self.prefix + name] = content
        self.bucket.record(f"put of {name}")

    def read(self, name: str) -> bytes:
        try:
            return self.bucket.objects[self.prefix + name]
        except KeyError as error:
            raise ObjectMissing(f"{self.uri}/{name}") from error

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[io.BytesIO]:
        yield io.BytesIO(self.read(name))

    def objects(self) -> dict[str, int]:
        return {
            name.removeprefix(self.prefix): len(content)
            for name, content in self.bucket.objects.items()
            if name.startswith(self.prefix)
        }

    def listing(self, prefix: str = "") -> dict[str, ObjectFacts]:
        return {
            name: ObjectFacts(size, shard_digest(self.read(name)))
            for name, size in self.objects().items()
            if name.startswith(prefix)
        }

    def folders(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.objects() if "/" in name})

    def delete(self, name: str) -> None:
        self.bucket.objects.pop(self.prefix + name, None)
        self.bucket.record(f"removal of {name}")

    def delete_broken(self) -> None:
        self.bucket.unfinished = {
            name for name in self.bucket.unfinished if not name.startswith(self.prefix)
        }

    def delete_all(self) -> None:
        removed = [self.prefix + name for name in self.objects()]
        left = self.bucket.objects.copy()
        for _repetition in range(REMOVALS):
            part = left.copy()
            for name in self.bucket.random.sample(removed, len(removed)):
                del part[name]
                self.bucket.record("removal of a folder", part)
        for name in removed:
            del self.bucket.objects[name]
        self.bucket.record("removal of a folder")
