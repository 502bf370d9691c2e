"""The package of Holdfast's own code that a server sends to the nodes of a Ray cluster.

It has the packages that supervisors, agents and users' programs import, from the folders that this
process imported them from, editable installs included, and the entry points of the installation, by
which Lightning finds its plug-in. Its name has the build of its ranks and a digest of all its
files, so that equal code is stored and unpacked once, and other code never takes its place.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from holdfast_service.extras import DISTRIBUTION
from holdfast_workers import build

PACKAGES = ("holdfast", "holdfast_service", "holdfast_workers")
NOT_SENT = ("dashboard",)
"""Folders of a package that only a server needs."""
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time of a ZIP entry
_MODE = 0o644 << 16
_LENGTH = 12


@dataclass(frozen=True)
class SentCode:
    """`uri`: where Ray stores the package."""

    uri: str
    content: bytes


def own_code() -> SentCode:
    """The package of the code of this process, read when it starts; some 0.1 s. Raises OSError."""
    found = (importlib.util.find_spec(name) for name in PACKAGES)
    folders = [Path(spec.origin).parent for spec in found if spec is not None and spec.origin]
    files = {
        f"{folder.name}/{name}": (folder / name).read_bytes()
        for folder in folders
        for name in sent_names(str(path.relative_to(folder)) for path in _files(folder))
    }
    content = packed({**files, **_about_installation()})
    digest = hashlib.sha256(content).hexdigest()[:_LENGTH]
    return SentCode(f"gcs://_ray_pkg_holdfast_{build.LOADED}_{digest}.zip", content)


def sent_names(names: Iterable[str]) -> list[str]:
    """The names of a package's files that are sent, sorted: no caches and no hidden files. Pure."""
    return sorted(name for name in names if not _is_left_out(PurePosixPath(name)))


def packed(files: Mapping[str, bytes]) -> bytes:
    """A ZIP archive of the files, which depends on names and contents only. Pure."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as package:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = _MODE
            package.writestr(entry, files[name])
    return archive.getvalue()


def _about_installation() -> dict[str, bytes]:
    """Name and entry points of the installed distribution; nothing without an installation."""
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return {}
    folder = f"{DISTRIBUTION.replace('-', '_')}-{installed.version}.dist-info"
    texts = {name: installed.read_text(name) for name in ("METADATA", "entry_points.txt")}
    return {f"{folder}/{name}": text.encode() for name, text in texts.items() if text is not None}


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _is_left_out(path: PurePosixPath) -> bool:
    if path.parts[0] in NOT_SENT:
        return True
    is_hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    return is_hidden or path.suffix in (".pyc", ".pyo")
