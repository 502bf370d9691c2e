"""A job's remote tier as the control plane knows it: where it lies, by which credentials, and
whether it can be used, which is tried before a job is accepted.

A named secret is a file `secrets/<name>.json` in the data directory, for its owner alone. It is
read when a job is submitted and when its supervisor is made, and goes from there to the agents in
memory: it is never stored in the database, in an event or in a log.
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
from holdfast_workers.checkpoint.storage import (
    ObjectExists,
    Storage,
    StorageError,
    StorageOptions,
    joined,
    open_storage,
)
from holdfast_workers.spec import Fault, RemoteTierSpec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NEEDED = {"access_key_id", "secret_access_key"}
_KNOWN = _NEEDED | {"session_token"}


class SecretUnusable(Exception):
    """There is no such secret, or it is not as it must be. Says what to do, and nothing of it."""


def read_secret(folder: Path, name: str) -> dict[str, str]:
    """The named secret in `folder`. Raises SecretUnusable."""
    if _NAME.fullmatch(name) is None:
        raise SecretUnusable(f"{name!r} is no name of a secret: use letters, digits and ._-")
    path = folder / f"{name}.json"
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read()
    except OSError as error:
        raise SecretUnusable(
            f"the server has no secret {name!r} ({path}: {error.strerror}): make that file, "
            f'mode 0600, with {{"access_key_id": "...", "secret_access_key": "..."}}'
        ) from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SecretUnusable(f"{path} can be read by others: chmod 600, owned by the server's user")
    try:
        secret = json.loads(content)
    except ValueError:
        secret = None  # what was wrong with it may quote it
    if not isinstance(secret, dict) or not _NEEDED <= secret.keys() <= _KNOWN:
        raise SecretUnusable(
            f"{path} must be a JSON object with access_key_id, secret_access_key and, if need be, "
            "session_token"
        )
    return {key: str(value) for key, value in secret.items()}


def credentials_of(spec: Mapping[str, Any], secrets: Path) -> dict[str, str] | None:
    """The credentials that a resolved spec names, if any. Raises SecretUnusable."""
    name = spec["checkpoint"]["remote"]["secret"]
    return None if name is None else read_secret(secrets, name)


def storage_options(
    remote: RemoteTierSpec, credentials: dict[str, str] | None, **limits: Any
) -> StorageOptions:
    return StorageOptions(
        endpoint=remote.endpoint, region=remote.region, credentials=credentials, **limits
    )


def remote_uri(spec: JobSpec, job_dir: Path) -> str:
    """The root of the job's remote checkpoints."""
    uri = spec.checkpoint.remote.uri
    return str(job_dir / "checkpoints") if uri is None else joined(uri, job_dir.name)


async def fault_of(remote: RemoteTierSpec, secrets: Path, deadline_s: float) -> Fault | None:
    """Why checkpoints cannot be kept there, found by keeping, reading and removing something."""
    if remote.uri is None:
        return None
    try:
        credentials = None if remote.secret is None else read_secret(secrets, remote.secret)
    except SecretUnusable as error:
        return Fault(path="checkpoint.remote.secret", message=str(error))
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
            await asyncio.to_thread(_try_out, remote.uri, options)
    except StorageError as error:
        return Fault(path="checkpoint.remote.uri", message=f"cannot keep checkpoints: {error}")
    except TimeoutError:
        why = f"{remote.uri} did not answer within {deadline_s:g} s: check endpoint and network"
        return Fault(path="checkpoint.remote.uri", message=why)
    return None


def _try_out(uri: str, options: StorageOptions) -> None:
    """List, write, read and delete, in a folder of our own that does not stay."""
    at = open_storage(uri, options).below(f".holdfast-probe-{uuid.uuid4().hex}")
    at.objects()
    with contextlib.suppress(ObjectExists):  # our own: an answer was lost, and it tried again
        at.put_new("probe", b"can be written")
    try:
        _require_never_replaced(at)
        if at.read("probe") != b"can be written":
            raise StorageError(at.uri, "what was written does not come back")
    finally:
        at.delete_all()


def _require_never_replaced(at: Storage) -> None:
    """A service that ignores the condition of a write would let two publish in one place."""
    try:
        at.put_new("probe", b"was replaced")
    except ObjectExists:
        return
    why = "it replaces what is there although asked not to: use one that obeys If-None-Match"
    raise StorageError(at.uri, why)
