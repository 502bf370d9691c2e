"""The remote tier of a job: its location, its credentials, and the test that it can be used, which
runs before a job is accepted; and the credentials for its sources of data.

A named secret is a file `secrets/<name>.json` in the data directory, readable only by its owner. It
names the only bucket that it is for, and the endpoint if that is not AWS. It is read when a job is
submitted and when its supervisor is created, and is passed on to the agents in memory: it is never
stored in the database, in an event or in a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.preparation import (
    WEIGHTS,
    SourceRequest,
    WeightsRequest,
    requests_of,
    root_of,
    weights_request,
)
from holdfast_service.settings import SECRETS, Settings
from holdfast_workers.checkpoint.location_faults import BucketAccess
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.s3_endpoint import is_same_endpoint
from holdfast_workers.checkpoint.storage import (
    ObjectExists,
    Storage,
    StorageError,
    TransientStorageError,
    joined,
    local_folder,
    uri_fault,
)
from holdfast_workers.private_files import PrivateFileRefused, read_private
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec import DataSpec, RemoteTierSpec, SpecFault

PROBE_S = 10.0
"""Deadline of the test of a job's remote storage at submission."""
_SECRET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_CREDENTIALS = ("access_key_id", "secret_access_key", "session_token")
_REQUIRED_KEYS = {"access_key_id", "secret_access_key", "bucket"}
_ALLOWED_KEYS = _REQUIRED_KEYS | {"session_token", "endpoint"}


class SecretUnusable(Exception):
    """The secret does not exist, is invalid, or is for another bucket. The message says what to do,
    and never quotes the credentials."""


@dataclass(frozen=True)
class NamedSecret:
    """Credentials, and the only bucket that they are for, by the operator's word."""

    credentials: dict[str, str] = field(repr=False)
    bucket: str
    endpoint: str | None
    """URL of the S3 service; None for AWS."""


def read_secret(folder: Path, name: str) -> NamedSecret:
    """The named secret in `folder`. Raises SecretUnusable."""
    if _SECRET_NAME.fullmatch(name) is None:
        raise SecretUnusable(
            f"{name!r} is not a valid name of a secret: use letters, digits and ._-"
        )
    path = folder / f"{name}.json"
    shown = f"{SECRETS}/{path.name}"
    """The part of the path that users may know."""
    try:
        content = read_private(path)
    except PrivateFileRefused as error:
        raise SecretUnusable(
            f"the server's file {shown} is refused: {error.why}; the operator must make it "
            "readable for the server's user alone (chmod 600)"
        ) from error
    except OSError as error:
        raise SecretUnusable(
            f"the server has no secret {name!r} ({shown}: {error.strerror}): the operator must "
            'create that file beside its keys, mode 0600, with {"access_key_id": "...", '
            '"secret_access_key": "...", "bucket": "...", "endpoint": "..."}; without endpoint it '
            "is for AWS"
        ) from error
    try:
        secret = json.loads(content)
    except ValueError:
        secret = None  # the error is dropped, as it may quote the secret
    if not isinstance(secret, dict) or not _REQUIRED_KEYS <= secret.keys() <= _ALLOWED_KEYS:
        raise SecretUnusable(
            f"the server's file {shown} must be a JSON object with access_key_id, "
            "secret_access_key, the bucket that they are for, and optionally session_token and "
            "endpoint (without it: AWS)"
        )
    return NamedSecret(
        {key: str(secret[key]) for key in _CREDENTIALS if key in secret},
        str(secret["bucket"]),
        None if secret.get("endpoint") is None else str(secret["endpoint"]),
    )


def credentials_for(uri: str | None, access: BucketAccess, secrets: Path) -> dict[str, str] | None:
    """The credentials for the storage at `uri`, which a section of a job's spec reaches so; None:
    those of the machine, or none needed. Raises SecretUnusable."""
    if uri is None or not uri.startswith("s3://"):
        return None
    if access.secret is None:
        if access.endpoint is not None:
            raise SecretUnusable(
                f"the endpoint {access.endpoint} needs a named secret: the server's own "
                "credentials are for AWS only"
            )
        return None
    secret, bucket = read_secret(secrets, access.secret), urlsplit(uri).netloc
    if bucket != secret.bucket or not is_same_endpoint(access.endpoint, secret.endpoint):
        raise SecretUnusable(
            f"the secret {access.secret!r} is for the bucket {secret.bucket} at "
            f"{secret.endpoint or 'AWS'}, not for {bucket} at {access.endpoint or 'AWS'}: change "
            "bucket or endpoint, or ask the operator for a secret for that bucket"
        )
    return secret.credentials


def source_secret_faults(data: DataSpec, secrets: Path) -> list[SpecFault]:
    """The faults of the named secrets of a job's sources. One whose own form is wrong, or which is
    prepared already, is not looked at."""
    found = []
    for place, source in ({} if data.prepared else data.read_sources).items():
        bucket = source.bucket
        if source.secret is None or bucket is None or uri_fault(bucket) is not None:
            continue
        try:
            credentials_for(bucket, source, secrets)
        except SecretUnusable as error:
            found.append(SpecFault(path=f"{place}.secret", message=str(error)))
    return found


def storage_options(
    access: BucketAccess, credentials: dict[str, str] | None, **others: Any
) -> StorageOptions:
    return StorageOptions(
        endpoint=access.endpoint, region=access.region, credentials=credentials, **others
    )


def remote_uri(uri: str | None, job_dir: Path) -> str:
    """The URI below which the remote checkpoints of a job are stored. `uri`: of its resolved spec.
    `job_dir`: the job's folder, named by its id; used if the spec names no place."""
    return str(job_dir / "checkpoints") if uri is None else joined(uri, job_dir.name)


def source_requests(spec: JobSpec, settings: Settings) -> list[SourceRequest]:
    """What is asked of the cluster for the sources of a resolved spec."""
    root = root_of(spec.checkpoint.remote, settings.data_dir)
    return requests_of(spec, root, refuse_local=not settings.allow_local_storage)


def request_of_weights(spec: JobSpec, settings: Settings) -> WeightsRequest | None:
    """What is asked of the cluster for the published model of a resolved spec, if it must be."""
    return weights_request(spec, root_of(spec.checkpoint.remote, settings.data_dir, WEIGHTS))


async def find_storage_fault(
    remote: RemoteTierSpec, settings: Settings, threads: Executor
) -> SpecFault | None:
    """:func:`probe_storage`, for a job's spec: why checkpoints cannot be stored there, or None."""
    try:
        await probe_storage(remote, settings, threads)
    except SecretUnusable as error:
        return SpecFault(path="checkpoint.remote.secret", message=str(error))
    except StorageError as error:
        return SpecFault(path="checkpoint.remote.uri", message=f"cannot store checkpoints: {error}")
    return None


async def probe_storage(remote: RemoteTierSpec, settings: Settings, threads: Executor) -> None:
    """:func:`probe` in one of `threads`; nothing is tested if `remote` names no place. Raises
    SecretUnusable, StorageError."""
    access = hasty_access(remote, settings)
    if access is None:
        return
    try:
        async with asyncio.timeout(PROBE_S):
            await asyncio.wrap_future(threads.submit(probe, *access))
    except TimeoutError as error:
        why = f"it did not answer within {PROBE_S:g} s: check endpoint and network"
        raise TransientStorageError(access[0], why) from error


def hasty_access(remote: RemoteTierSpec, settings: Settings) -> tuple[str, StorageOptions] | None:
    """URI of the storage, and options that give up within `PROBE_S`; None: `remote` names
    no place. Raises SecretUnusable."""
    if remote.uri is None:
        return None
    credentials = credentials_for(remote.uri, remote, settings.secrets_dir)
    short = {
        "connect_timeout_s": PROBE_S / 4,
        "read_timeout_s": PROBE_S / 4,
        "part_timeout_s": PROBE_S / 4,
        "patience_s": PROBE_S / 2,
        "attempts": 2,
    }
    local = not settings.allow_local_storage
    return remote.uri, storage_options(remote, credentials, refuse_local=local, **short)


def probe(uri: str, options: StorageOptions) -> None:
    """Test the storage: list, write, read and delete in a temporary folder. Removes the folders
    that it had to create: the job may be refused. Raises StorageError."""
    folder = open_storage(uri, options).below(f".holdfast-probe-{uuid.uuid4().hex}")
    folder.objects()  # refuses a path that no folder can have
    root = local_folder(uri)
    missing = [] if root is None else [at for at in (root, *root.parents) if not at.exists()]
    with contextlib.suppress(ObjectExists):  # by an earlier try whose answer was lost
        folder.put_new("probe", b"can be written")
    try:
        _require_conditional_writes(folder)
        if folder.read("probe") != b"can be written":
            raise StorageError(
                folder.uri, "it returns other bytes than were written: check the storage service"
            )
    finally:
        folder.delete_all()
        with contextlib.suppress(OSError):  # another job may use the folder by now
            for made in missing:
                made.rmdir()


def _require_conditional_writes(probe: Storage) -> None:
    """A service that ignores conditional writes would let two writers publish the same name."""
    try:
        probe.put_new("probe", b"was replaced")
    except ObjectExists:
        return
    why = "it overwrites objects despite If-None-Match: use a storage service that supports it"
    raise StorageError(probe.uri, why)
