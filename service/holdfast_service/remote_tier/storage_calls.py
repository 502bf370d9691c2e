"""Calls to the storage of remote checkpoints, in separate threads, each with a deadline.

The storage is reached as the job's nodes reach it: by endpoint, region and secret of the spec. A
storage that hangs blocks these threads, and nothing else of the control plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from holdfast_service.errors import StorageUnavailable
from holdfast_service.remote_tier.location import SecretUnusable, credentials_of, storage_options
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
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="storage-call")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="storage-reader")

    def storage_at(self, uri: str, spec: Mapping[str, Any]) -> Storage:
        """The storage rooted at `uri`, as configured in a job's resolved spec. Does not connect.

        Raises StorageUnavailable if the secret in the spec cannot be used.
        """
        try:
            credentials = credentials_of(spec, self._secrets)
        except SecretUnusable as error:
            raise StorageUnavailable(str(error)) from error
        remote = RemoteTierSpec.model_validate(spec["checkpoint"]["remote"])
        return open_storage(uri, storage_options(remote, credentials))

    async def run(
        self, call: Callable[Params, Answer], *args: Params.args, **kwargs: Params.kwargs
    ) -> Answer:
        """The call's result. Raises StorageUnavailable, or any other error of the call."""
        return await _answer(self.start(call, *args, **kwargs), self._deadline_s)

    async def read_through(
        self,
        deadline_s: float,
        call: Callable[Params, Answer],
        *args: Params.args,
        **kwargs: Params.kwargs,
    ) -> Answer:
        """As :meth:`run`, for calls that read whole checkpoints: only a few run at a time."""
        return await _answer(self.start_reading(call, *args, **kwargs), deadline_s)

    def start(
        self, call: Callable[Params, Answer], *args: Params.args, **kwargs: Params.kwargs
    ) -> asyncio.Future[Answer]:
        """Start the call; the caller is responsible for its deadline."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    def start_reading(
        self, call: Callable[Params, Answer], *args: Params.args, **kwargs: Params.kwargs
    ) -> asyncio.Future[Answer]:
        """As :meth:`start`, for calls that read whole checkpoints."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._readers, lambda: call(*args, **kwargs))


async def _answer(call: asyncio.Future[Answer], deadline_s: float) -> Answer:
    try:
        return await asyncio.wait_for(call, deadline_s)
    except TimeoutError as error:
        raise StorageUnavailable(f"the storage did not answer in {deadline_s:g} s") from error
    except StorageError as error:
        raise StorageUnavailable(str(error)) from error
