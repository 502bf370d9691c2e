"""The remote tier of a job: its location, its credentials, and the test that it can be used, which
runs before a job is accepted.

A named secret is a file `secrets/<name>.json` in the data directory, readable only by its owner. It
is read when a job is submitted and when its supervisor is created, and is passed on to the agents
in memory: it is never stored in the database, in an event or in a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import (
    ObjectExists,
    Storage,
    StorageError,
    StorageOptions,
    joined,
)
from holdfast_workers.spec import RemoteTierSpec, SpecFault

_SECRET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_REQUIRED_KEYS = {"access_key_id", "secret_access_key"}
_ALLOWED_KEYS = _REQUIRED_KEYS | {"session_token"}


class SecretUnusable(Exception):
    """The secret does not exist or is invalid. The message says what to do, and never quotes it."""


def read_secret(folder: Path, name: str) -> dict[str, str]:
    """The named secret in `folder`. Raises SecretUnusable."""
    if _SECRET_NAME.fullmatch(name) is None:
        raise SecretUnusable(
            f"{name!r} is not a valid name of a secret: use letters, digits and ._-"
        )
    path = folder / f"{name}.json"
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read()
    except OSError as error:
        raise SecretUnusable(
            f"the server has no secret {name!r} ({path}: {error.strerror}): create that file, "
            f'mode 0600, with {{"access_key_id": "...", "secret_access_key": "..."}}'
        ) from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise SecretUnusable(
            f"{path} can be read by other users: make the server's user its owner, and chmod 600 it"
        )
    try:
        secret = json.loads(content)
    except ValueError:
        secret = None  # the error is dropped, as it may quote the secret
    if not isinstance(secret, dict) or not _REQUIRED_KEYS <= secret.keys() <= _ALLOWED_KEYS:
        raise SecretUnusable(
            f"{path} must be a JSON object with access_key_id, secret_access_key and optionally "
            "session_token"
        )
    return {key: str(value) for key, value in secret.items()}


def credentials_of(spec: Mapping[str, Any], secrets: Path) -> dict[str, str] | None:
    """The credentials that a resolved spec refers to, if any. Raises SecretUnusable."""
    name = spec["checkpoint"]["remote"]["secret"]
    return None if name is None else read_secret(secrets, name)


def storage_options(
    remote: RemoteTierSpec, credentials: dict[str, str] | None, **limits: Any
) -> StorageOptions:
    return StorageOptions(
        endpoint=remote.endpoint, region=remote.region, credentials=credentials, **limits
    )


def remote_uri(spec: JobSpec, job_dir: Path) -> str:
    """The URI below which the job's remote checkpoints are stored."""
    uri = spec.checkpoint.remote.uri
    return str(job_dir / "checkpoints") if uri is None else joined(uri, job_dir.name)


async def find_storage_fault(
    remote: RemoteTierSpec, secrets: Path, deadline_s: float
) -> SpecFault | None:
    """Test the remote storage by writing, reading and deleting an object. Returns why checkpoints
    cannot be stored there, or None."""
    if remote.uri is None:
        return None
    try:
        credentials = None if remote.secret is None else read_secret(secrets, remote.secret)
    except SecretUnusable as error:
        return SpecFault(path="checkpoint.remote.secret", message=str(error))
    short = {
        "connect_timeout_s": deadline_s / 4,
        "read_timeout_s": deadline_s / 4,
        "part_timeout_s": deadline_s / 4,
        "patience_s": deadline_s / 2,
        "attempts": 2,
    }
    options = storage_options(remote, credentials, **short)
    try:
        async with asyncio.timeout(deadline_s):
            await asyncio.to_thread(_probe, remote.uri, options)
    except StorageError as error:
        return SpecFault(path="checkpoint.remote.uri", message=f"cannot store checkpoints: {error}")
    except TimeoutError:
        why = f"{remote.uri} did not answer within {deadline_s:g} s: check endpoint and network"
        return SpecFault(path="checkpoint.remote.uri", message=why)
    return None


def _probe(uri: str, options: StorageOptions) -> None:
    """List, write, read and delete in a temporary folder. Raises StorageError."""
    probe = open_storage(uri, options).below(f".holdfast-probe-{uuid.uuid4().hex}")
    probe.objects()
    with contextlib.suppress(ObjectExists):  # by an earlier try whose answer was lost
        probe.put_new("probe", b"can be written")
    try:
        _require_conditional_writes(probe)
        if probe.read("probe") != b"can be written":
            raise StorageError(
                probe.uri, "it returns other bytes than were written: check the storage service"
            )
    finally:
        probe.delete_all()


def _require_conditional_writes(probe: Storage) -> None:
    """A service that ignores conditional writes would let two writers publish the same name."""
    try:
        probe.put_new("probe", b"was replaced")
    except ObjectExists:
        return
    why = "it overwrites objects despite If-None-Match: use a storage service that supports it"
    raise StorageError(probe.uri, why)
