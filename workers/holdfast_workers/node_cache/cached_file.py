"""A file made from the data on a node: built once, named by the fingerprint of its content.

A build is atomic (temporary file, then rename) and done by one process per node; other processes
wait. An index file of the source's key leads to the fingerprint, so that nothing is built again
while the source is unchanged.

A process holds a shared lock on each file that it uses, and so do the processes that it forks.
After each build, and before a file comes from elsewhere, the files that were used least recently
are removed until the rest has the size that the node's setting allows; files in use stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from holdfast_workers.errors import WorkersError
from holdfast_workers.node_cache import use_locks
from holdfast_workers.private_files import make_private_folder

CACHE_VARIABLE = "HOLDFAST_CACHE_DIR"
"""Environment variable of a node: the folder of its caches."""
LIMIT_VARIABLE = "HOLDFAST_CACHE_LIMIT_GB"
"""Environment variable of a node: the most that its caches keep, in units of 10^9 bytes."""
DEFAULT_LIMIT_GB = 100.0
_LOCK = "build.lock"
_UNFINISHED = "shard-*.part"
_KINDS = ("*.bin", "tokens-*.json", _UNFINISHED)
"""Files that count towards the limit: all content, the manifests of token sets, and the shards that
come."""


class NoCacheFolder(WorkersError):
    """The environment of the node names no folder."""


class InvalidCacheLimit(WorkersError):
    """The environment of the node names no size."""


@dataclass(frozen=True)
class CachedFile:
    """A file that is in use by this process until it ends: nothing removes it."""

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


def cache_limit_bytes(environ: Mapping[str, str]) -> int:
    """Raises InvalidCacheLimit."""
    setting = environ.get(LIMIT_VARIABLE) or str(DEFAULT_LIMIT_GB)
    try:
        limit = float(setting)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < math.inf:
        raise InvalidCacheLimit(f"{LIMIT_VARIABLE}={setting!r} is not a number of GB")
    return int(limit * 1e9)


def cached_file(cache_dir: Path, name: str, key: str, parts: Iterable[bytes]) -> CachedFile:
    """The file of the source with `key`. If it does not exist yet, it is built of `parts`, which
    are read only then. `name`: of the kind of file. Raises InvalidCacheLimit."""
    limit = cache_limit_bytes(os.environ)
    make_private_folder(cache_dir)
    index = cache_dir / f"source-{key}.json"
    with _build_lock(cache_dir):
        found = _cached(index, cache_dir, name)
        if found is not None:
            _use(found.path)
            return found
        built = _built(parts, cache_dir, name, index)
        _use(built.path)
        _shrink(cache_dir, limit)
        return built


def make_room(cache_dir: Path, limit_bytes: int, or_kept: bool = False) -> int:
    """Remove files without users, until the rest has this size; those that others keep for later
    come last, or stay (`or_kept`). A shard that is to come counts by the size of its unfinished
    file. Returns how many bytes are still too many, since others use their files; 0: there is room.
    While another process builds a file, nothing is removed: that process does so when it is done.
    """
    with (cache_dir / _LOCK).open("w+") as lock:  # on NFS, it must be readable to be shared
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            left = sum(status.st_size for status, _ in _content(cache_dir))
        else:
            left = _shrink(cache_dir, limit_bytes, or_kept)
    return max(0, left - limit_bytes)


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


def _use(path: Path) -> None:
    use_locks.note_use(use_locks.hold(path))


def _shrink(cache_dir: Path, limit_bytes: int, or_kept: bool = False) -> int:
    """Remove files without users, those of the earliest use first, down to the limit; those that
    others keep for later come last, or stay. Returns the size of the rest."""
    for left in cache_dir.glob(_UNFINISHED):  # of a process that was killed
        if (unfinished := use_locks.lock_unfinished(left)) is not None:
            use_locks.close_unfinished(unfinished, left)
    total, candidates = 0, list[tuple[int, Path, int]]()
    for status, path in _content(cache_dir):
        total += status.st_size
        if not path.match(_UNFINISHED):
            candidates.append((status.st_atime_ns, path, status.st_size))
    removed = set[str]()
    for spared in (True,) if or_kept else (True, False):
        in_use = []
        for candidate in sorted(candidates):
            _, path, nbytes = candidate
            if total <= limit_bytes:
                break
            with contextlib.suppress(FileNotFoundError):  # a reader found it damaged
                if not use_locks.unlink_unless_used(path, spared):
                    in_use.append(candidate)
                    continue
            removed.add(path.stem.rpartition("-")[2])
            total -= nbytes
        candidates = in_use
    for index in cache_dir.glob("source-*.json") if removed else ():
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads(index.read_text())["fingerprint"] in removed:
                index.unlink()
    return total


def _content(cache_dir: Path) -> list[tuple[os.stat_result, Path]]:
    """The files that count towards the limit."""
    files = []
    for path in (path for kind in _KINDS for path in cache_dir.glob(kind)):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            files.append((path.stat(), path))
    return files


@contextmanager
def _build_lock(cache_dir: Path) -> Iterator[None]:
    """Admits one builder per cache folder; the kernel releases the lock if the process dies."""
    with (cache_dir / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _path(cache_dir: Path, name: str, fingerprint: str) -> Path:
    return cache_dir / f"{name}-{fingerprint}.bin"
