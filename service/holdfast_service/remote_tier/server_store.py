"""The server's own store: where the remote checkpoints of jobs go that name no place.

It is written into a job's spec when the job is submitted. A later change of the settings concerns
later jobs only, and no checkpoint is lost from sight.
"""

from __future__ import annotations

from concurrent.futures import Executor

import structlog
from pydantic import ValidationError

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.remote_tier.location import SecretUnusable, probe_storage
from holdfast_service.settings import Settings
from holdfast_workers.checkpoint.location_faults import remote_tier_faults
from holdfast_workers.checkpoint.storage import StorageError, TransientStorageError
from holdfast_workers.spec import RemoteTierSpec

_PLACE = ("uri", "endpoint", "region", "secret")
"""The fields of the remote tier that say where it is."""

_log = structlog.get_logger()


class StoreUnusable(Exception):
    """The server cannot start with its store; the message says why, and what to do."""


def refuse_wrong_settings(settings: Settings) -> None:
    """Raises StoreUnusable, without a look at the storage."""
    if settings.ray_address is not None and settings.store_uri is None:
        raise StoreUnusable(
            "--ray-address needs a store: the nodes of that cluster do not see the data directory "
            "of this server; give --store-uri s3://bucket/prefix, or an absolute path that the "
            "server and all nodes share"
        )
    try:
        store = remote_tier_of(settings)
    except ValidationError as error:
        problems = (f"--store-{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
        raise StoreUnusable("; ".join(problems)) from error
    faults = remote_tier_faults(store)
    if faults:
        raise StoreUnusable(
            "; ".join(f"{_option(fault.path)}: {fault.message}" for fault in faults)
        )


async def refuse_unusable(settings: Settings, threads: Executor) -> None:
    """Test the store. One that does not answer now is reported in the log, and jobs are refused
    meanwhile; the server is needed for those that run. Raises StoreUnusable."""
    try:
        await probe_storage(remote_tier_of(settings), settings, threads)
    except SecretUnusable as error:
        raise StoreUnusable(f"--store-secret: {error}") from error
    except TransientStorageError as error:
        _log.warning("the store cannot be used now: new jobs are refused", why=str(error))
    except StorageError as error:
        raise StoreUnusable(f"--store-uri: cannot store checkpoints: {error}") from error


def with_store(spec: JobSpec, settings: Settings) -> JobSpec:
    """The spec with the server's store as its place of remote checkpoints, if it names none."""
    if settings.store_uri is None or spec.checkpoint.remote.uri is not None:
        return spec
    place = {name: getattr(settings, f"store_{name}") for name in _PLACE}
    remote = spec.checkpoint.remote.model_copy(update=place)
    checkpoint = spec.checkpoint.model_copy(update={"remote": remote})
    return spec.model_copy(update={"checkpoint": checkpoint})


def remote_tier_of(settings: Settings) -> RemoteTierSpec:
    """The server's store as a job names it; without `uri` if the server has none."""
    return RemoteTierSpec.model_validate(
        {name: getattr(settings, f"store_{name}") for name in _PLACE}
    )


def _option(path: str) -> str:
    return f"--store-{path.rpartition('.')[2]}"
