"""Calls to the storage of remote checkpoints, in separate threads, each with a deadline.

The storage is reached as the job's nodes reach it: by endpoint, region and secret of the spec. A
storage that hangs blocks these threads, and nothing else of the control plane, not even its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from holdfast_service.daemon_threads import DaemonThreads
from holdfast_service.errors import StorageUnavailable
from holdfast_service.remote_tier.location import SecretUnusable, credentials_for, storage_options
from holdfast_service.settings import Settings
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage, StorageError
from holdfast_workers.spec import RemoteTierSpec

_THREADS = 8
_READERS = 4  # for reads of whole checkpoints: other calls do not wait behind these long ones

Params = ParamSpec("Params")
Answer = TypeVar("Answer")


class StorageCalls:
    """Runs calls to storages, whose errors and timeouts become StorageUnavailable."""

    def __init__(self, settings: Settings) -> None:
        self._deadline_s = settings.storage_deadline_s
        self._secrets = settings.secrets_dir
        self._refuse_local = not settings.allow_local_storage
        self._threads = DaemonThreads(_THREADS, "storage-call")
        self._readers = DaemonThreads(_READERS, "storage-reader")

    def storage_at(self, uri: str, spec: Mapping[str, Any]) -> Storage:
        """The storage rooted at `uri`, as configured in a job's resolved spec. Does not connect.

        Raises StorageUnavailable if the secret in the spec cannot be used for `uri`.
        """
        remote = RemoteTierSpec.model_validate(spec["checkpoint"]["remote"])
        try:
            credentials = credentials_for(uri, remote, self._secrets)
        except SecretUnusable as error:
            raise StorageUnavailable(str(error)) from error
        return open_storage(
            uri, storage_options(remote, credentials, refuse_local=self._refuse_local)
        )

    async def run(
        self, call: Callable[Params, Answer], *args: Params.args, **kwargs: Params.kwargs
    ) -> Answer:
        """The call's result. Raises StorageUnavailable, or any other error of the call."""
        return await _answer(self.start(call, *args, **kwargs), self._deadline_s)

    def start(
        self, call: Callable[Params, Answer], *args: Params.args, **kwargs: Params.kwargs
    ) -> asyncio.Future[Answer]:
        """Start the call; the caller is responsible for its deadline."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    def start_reading(
        self, call: Callable[Params, Answer], *args: Params.args, **kwargs: Params.kwargs
    ) -> asyncio.Future[Answer]:
        """Start a call as :meth:`start` does, for calls that read whole checkpoints."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._readers, lambda: call(*args, **kwargs))


async def _answer(call: asyncio.Future[Answer], deadline_s: float) -> Answer:
    try:
        return await asyncio.wait_for(call, deadline_s)
    except TimeoutError as error:
        raise StorageUnavailable(f"the storage did not answer in {deadline_s:g} s") from error
    except StorageError as error:
        raise StorageUnavailable(str(error)) from error
