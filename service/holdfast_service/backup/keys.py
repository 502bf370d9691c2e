"""The files of the folder of keys that a backup has: the key of all jobs, and named secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from holdfast_service.backup.backup_file import BackupError
from holdfast_service.settings import JOB_KEY, SECRETS, Settings
from holdfast_workers.private_files import PrivateFileRefused, read_private

_SECRET_FILE = re.compile(rf"{SECRETS}/[A-Za-z0-9][A-Za-z0-9._-]{{0,62}}\.json")
_FOLDER = "keys/"


def present_keys(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Member of the backup -> file, of those that exist."""
    if settings.job_key_file.is_file():
        yield _FOLDER + JOB_KEY, settings.job_key_file
    if settings.secrets_dir.is_dir():
        for path in sorted(settings.secrets_dir.iterdir()):
            name = f"{SECRETS}/{path.name}"
            if _SECRET_FILE.fullmatch(name) and path.is_file():
                yield _FOLDER + name, path


def read_key(path: Path) -> bytes:
    """Raises BackupError for a file that others could have read or written."""
    try:
        return read_private(path)
    except PrivateFileRefused as error:
        raise BackupError(str(error)) from error


def is_job_key(member: str) -> bool:
    return member == _FOLDER + JOB_KEY


def place_of(member: str, settings: Settings) -> Path:
    """The path at which the key belongs. Raises BackupError for a name that no key has."""
    name = member.removeprefix(_FOLDER)
    if name == JOB_KEY:
        return settings.job_key_file
    if _SECRET_FILE.fullmatch(name):
        return settings.secrets_dir / name.removeprefix(f"{SECRETS}/")
    raise BackupError(f"the backup has a key {member!r}, which this version does not know")
