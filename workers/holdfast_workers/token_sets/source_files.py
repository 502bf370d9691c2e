"""The files of a source: found by a path, a folder or a glob, on this node or in a bucket.

Nothing is left out silently: a folder with a file of an unknown kind is refused, and so is what
cannot be read. Only names with a dot or an underscore at their beginning are passed over, as marks
of other programs. A name that exists is taken literally, even if it looks like a glob.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path, PurePosixPath

from holdfast_workers.checkpoint.local_files import facts_of_file
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import (
    ObjectFacts,
    Storage,
    TransientStorageError,
    uri_fault,
)
from holdfast_workers.errors import WorkersError
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec.train import SourceSpec
from holdfast_workers.token_sets.file_kinds import KNOWN, FileKind, form_of
from holdfast_workers.token_sets.globs import (
    files_below,
    literal_prefix,
    matching_files,
    pattern_of,
)
from holdfast_workers.token_sets.refusals import DataRefused, shortened, unreadable

MOST_FILES = 200_000
SCHEME = "s3://"
STATE = "state.json"
INFO = "dataset_info.json"
SPLITS = "dataset_dict.json"
_MOST_STATE_BYTES = 1 << 24
_SELECTIONS = ("_indices_data_files", "_indices_files")
"""Keys of a state that names the rows which belong to the set; older versions write them."""


@dataclass(frozen=True)
class SourceFile:
    name: str
    """An absolute path, or s3://bucket/key."""
    nbytes: int
    stamp: str
    """See `ObjectFacts`."""


def list_source(source: SourceSpec, options: StorageOptions) -> tuple[SourceFile, ...]:
    """The source's files, sorted by name; those of a saved data set in its own order.

    Raises DataRefused, whose caller names the source, and errors of the storage.
    """
    path = source.path
    listed = _in_bucket(path, options) if path.startswith(SCHEME) else _on_node(path)
    if len(listed) > MOST_FILES:
        raise DataRefused(
            f"it has {len(listed):,} files, and {MOST_FILES:,} are possible: join "
            "them into larger ones, such as JSON lines or Parquet"
        )
    for file in listed:
        _check_name(file.name)
    return tuple(listed)


def refuse_shared_files(
    files: Sequence[SourceFile],
    source: SourceSpec,
    others: Iterable[tuple[SourceSpec, StorageOptions]],
) -> None:
    """Raises DataRefused if a file of the source is one of another source too, and errors of the
    storage, which name that source. `others`: each with the options of its bucket.

    Objects are compared by bucket and key alone: endpoints may be names of one service.
    """
    own = {_identity(file.name) for file in files}
    for other, options in others:
        if other.bucket != source.bucket:
            continue
        while_compared = f"while it is compared with the source {other.path}"
        try:
            found = [file.name for file in list_source(other, options)]
            shared = [name for name in found if _identity(name) in own]
        except TransientStorageError as error:
            raise TransientStorageError(f"{while_compared}: {error.uri}", error.reason) from error
        except WorkersError as error:
            raise DataRefused(f"{while_compared}: {error}") from error
        if shared:
            services = f"{source.endpoint or 'AWS'} and {other.endpoint or 'AWS'}"
            same = f" ({services} may be one)" if source.endpoint != other.endpoint else ""
            raise DataRefused(
                f"{shared[0]} is in the source {other.path} too{same}, and would be trained on: "
                "move it elsewhere, or name the files of that source by a glob without it"
            )


def _identity(name: str) -> str | tuple[int, int]:
    """Equal for two names of one file, links included. Raises DataRefused, and
    TransientStorageError."""
    if name.startswith(SCHEME):
        return name
    status = _status_of(Path(name))
    return status.st_dev, status.st_ino


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key; unlike in the URI of a storage, `?` and `#` are part of the key."""
    bucket, _, key = uri.removeprefix(SCHEME).partition("/")
    return bucket, key


def local_facts(path: Path) -> ObjectFacts:
    """Raises DataRefused unless it is a file that this process may read, and errors of the
    storage."""
    return facts_of_file(_status_of(path))


def _status_of(path: Path) -> os.stat_result:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(str(path), error) from error
    if not stat.S_ISREG(status.st_mode):
        raise DataRefused(f"{path} is no regular file: remove it, or leave it out of the path")
    if not os.access(path, os.R_OK):
        try:
            path.open("rb").close()
        except OSError as error:
            raise unreadable(str(path), error) from error
    return status


def _on_node(path: str) -> list[SourceFile]:
    if not path.startswith("/"):
        raise DataRefused("write an absolute path that every node can read, or s3://bucket/key")
    try:
        names = _local_names(Path(path))
    except OSError as error:
        raise unreadable(str(error.filename or path), error) from error
    listed = []
    seen: dict[tuple[int, int], str] = {}
    for name in names:
        status = _status_of(Path(name))
        other = seen.setdefault((status.st_dev, status.st_ino), name)
        if other != name:
            raise DataRefused(
                f"{other} and {name} are links to one file, which would count "
                "twice: remove one of them, or name the files that are meant"
            )
        facts = facts_of_file(status)
        listed.append(SourceFile(name, facts.nbytes, facts.stamp))
    return listed


def _local_names(path: Path) -> list[str]:
    if path.is_dir():
        if any((path / name).exists() for name in (SPLITS, STATE)):
            contents = {
                name: local_facts(path / name).nbytes
                for name in (SPLITS, STATE, INFO)
                if (path / name).exists()
            }
            saved = _saved_files(str(path), contents, lambda name: (path / name).read_bytes())
            return [str(path / name) for name in saved]
        below = (str(found.relative_to(path)) for found in files_below(path))
        return [str(path / name) for name in _all_of_folder(str(path), below)]
    if path.exists() or path.is_symlink():
        return [str(path)]
    if not has_magic(str(path)):
        raise DataRefused("it does not exist on this node: every node must have it")
    names = sorted({str(found) for found in matching_files(path)})
    return _nonempty(names)


def _in_bucket(uri: str, options: StorageOptions) -> list[SourceFile]:
    bucket, key = split_uri(uri)
    fault = uri_fault(f"{SCHEME}{bucket}")
    if fault is not None:
        raise DataRefused(fault)
    storage = open_storage(f"{SCHEME}{bucket}", options)
    known = {
        name: facts
        for name, facts in storage.listing(literal_prefix(key)).items()
        if not name.endswith("/")  # marks that consoles make for folders
    }
    names = _bucket_names(uri, key, known, storage)
    missing = [name for name in names if name not in known]
    if missing:
        raise DataRefused(f"{SCHEME}{bucket}/{missing[0]} does not exist: copy the data set again")
    return [
        SourceFile(f"{SCHEME}{bucket}/{name}", known[name].nbytes, known[name].stamp)
        for name in names
    ]


def _bucket_names(
    uri: str, key: str, known: Mapping[str, ObjectFacts], storage: Storage
) -> list[str]:
    if key in known:
        return [key]
    folder = f"{key.rstrip('/')}/" if key else ""
    below = {name.removeprefix(folder): name for name in known if name.startswith(folder)}
    if SPLITS in below or STATE in below:
        sizes = {name: known[whole].nbytes for name, whole in below.items()}
        saved = _saved_files(uri, sizes, lambda name: storage.read(folder + name))
        return [folder + name for name in saved]
    if below:
        shown = [name for name in below if not _is_hidden(name)]
        return sorted(folder + name for name in _all_of_folder(uri, shown))
    if not has_magic(key):
        raise DataRefused("no object has this name or lies below it: check the path")
    pattern = pattern_of(key)
    return _nonempty(sorted(name for name in known if pattern.fullmatch(name)))


def _all_of_folder(folder: str, names: Iterable[str]) -> list[str]:
    """All files of a folder. Raises DataRefused if it is not clear which of them are meant."""
    known = sorted(names)
    kinds = {name: form.kind for name in known if (form := form_of(name)) is not None}
    unknown = [name for name in known if name not in kinds]
    remedy = f"name the files that are meant, such as {folder.rstrip('/')}/**/*.parquet"
    if not kinds:
        raise DataRefused(f"it has no file of a known kind: {KNOWN}")
    if unknown:
        raise DataRefused(f"{_some(unknown)} of a kind that is not known: {remedy}")
    texts = [name for name, kind in kinds.items() if kind is FileKind.TEXT]
    if 0 < len(texts) < len(kinds):
        raise DataRefused(f"{_some(texts)} of text beside files with records: {remedy}")
    return known


def _saved_files(folder: str, sizes: Mapping[str, int], read: Callable[[str], bytes]) -> list[str]:
    """The files of a data set that the library `datasets` has saved, in its order."""
    name = SPLITS if SPLITS in sizes else STATE
    where = f"{folder.rstrip('/')}/{name}"
    if sizes[name] > _MOST_STATE_BYTES:
        raise DataRefused(f"{where} has over {_MOST_STATE_BYTES} bytes: save the data set again")
    try:
        content = json.loads(read(name))
        selected = any(content.get(key) for key in _SELECTIONS)
        if name == SPLITS:
            splits = [str(split) for split in content["splits"]]
        else:
            files = [str(entry["filename"]) for entry in content["_data_files"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataRefused(
            f"{where} is none of the library `datasets` ({shortened(error)}): save the data set "
            "again with save_to_disk, or name its files by a glob"
        ) from error
    if name == SPLITS:
        inner = ", ".join(f"{folder.rstrip('/')}/{split}" for split in splits)
        raise DataRefused(f"it has several splits: name the folder of one: {inner}")
    if selected:
        raise DataRefused(
            f"{where}: its rows are a selection of its files' rows: save it again after "
            "flatten_indices()"
        )
    if INFO not in sizes:
        raise DataRefused(f"{folder} has no {INFO}: save the data set again with save_to_disk")
    if not files or any("/" in file or file in ("", "..") for file in files):
        raise DataRefused(f"{where} names no files beside it: save the data set again")
    if len(set(files)) < len(files):
        raise DataRefused(f"{where} names a file twice: save the data set again")
    return files


def _nonempty(names: list[str]) -> list[str]:
    if names:
        return names
    raise DataRefused("it matches no file: check the path; ** matches any folders")


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        shown = name.encode(errors="surrogateescape")
        raise DataRefused(f"{shown!r}: the name is not UTF-8: rename the file") from error
    if form_of(name) is None:
        raise DataRefused(
            f"{name}: its kind is not known by its suffix; {KNOWN} can be read: convert or rename "
            f"it, or leave it out of the source"
        )


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in PurePosixPath(name).parts)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    files = "1 file" if len(names) == 1 else f"{len(names):,} files"
    return f"{files} ({shown}{', ...' if len(names) > 3 else ''})"
