"""A file made from the data on a node: built once, named by the fingerprint of its content.

A build is atomic (temporary file, then rename) and done by one process per node; other processes
wait. An index file of the source's key leads to the fingerprint, so that nothing is built again
while the source is unchanged.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from holdfast_workers.errors import WorkersError

CACHE_VARIABLE = "HOLDFAST_CACHE_DIR"
"""Environment variable of a node: the folder of its caches."""


class NoCacheFolder(WorkersError):
    """The environment of the node names no folder."""


@dataclass(frozen=True)
class CachedFile:
    path: Path
    fingerprint: str


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The folder of a node's caches, which need not be seen from any other node. Raises
    NoCacheFolder."""
    if environ.get(CACHE_VARIABLE):
        return Path(environ[CACHE_VARIABLE])
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "holdfast"
    try:
        return Path.home() / ".cache" / "holdfast"
    except RuntimeError as error:
        raise NoCacheFolder(
            f"this node's user has no home directory for caches: set {CACHE_VARIABLE}"
        ) from error


def cached_file(cache_dir: Path, name: str, key: str, parts: Iterable[bytes]) -> CachedFile:
    """The file of the source with `key`. If it does not exist yet, it is built of `parts`, which
    are read only then. `name`: of the kind of file."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    index = cache_dir / f"source-{key}.json"
    with _build_lock(cache_dir):
        found = _cached(index, cache_dir, name)
        return found or _built(parts, cache_dir, name, index)


def source_key(what: str, files: Iterable[tuple[str, Path]]) -> str:
    """A key that changes with `what`, and whenever a file's name, size or modification time
    changes."""
    key = xxhash.xxh3_128(what.encode())
    for name, path in files:
        status = path.stat()
        key.update(f"\0{name}\0{path}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return str(key.hexdigest())


def _cached(index: Path, cache_dir: Path, name: str) -> CachedFile | None:
    try:
        entry = json.loads(index.read_text())
        path = _path(cache_dir, name, entry["fingerprint"])
        is_whole = path.stat().st_size == entry["bytes"]
    except (OSError, ValueError, KeyError):  # not built yet, or deleted: build it
        return None
    return CachedFile(path, str(entry["fingerprint"])) if is_whole else None


def _built(parts: Iterable[bytes], cache_dir: Path, name: str, index: Path) -> CachedFile:
    digest = xxhash.xxh3_128()
    nbytes = 0
    for left in cache_dir.glob("building-*.part"):  # of a process that was killed: it had the lock
        left.unlink(missing_ok=True)
    unfinished = cache_dir / f"building-{os.getpid()}.part"
    try:
        with unfinished.open("wb") as out:
            for part in parts:
                digest.update(part)
                nbytes += out.write(part)
            out.flush()
            os.fsync(out.fileno())
        fingerprint = str(digest.hexdigest())
        path = _path(cache_dir, name, fingerprint)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    entry = index.with_suffix(f".{os.getpid()}.part")
    entry.write_text(json.dumps({"fingerprint": fingerprint, "bytes": nbytes}))
    entry.replace(index)
    return CachedFile(path, fingerprint)


@contextmanager
def _build_lock(cache_dir: Path) -> Iterator[None]:
    """Admits one builder per cache folder; the kernel releases the lock if the process dies."""
    with (cache_dir / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _path(cache_dir: Path, name: str, fingerprint: str) -> Path:
    return cache_dir / f"{name}-{fingerprint}.bin"
