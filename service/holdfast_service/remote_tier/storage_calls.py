"""Asks the storage of remote checkpoints, in threads of its own, with a deadline each.

It is reached as the job's own nodes reach it: by endpoint, region and secret of its spec. One that
hangs holds up these threads, and nothing else of the control plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from holdfast_service.job_model.job_errors import JobError
from holdfast_service.remote_tier.location import SecretUnusable, credentials_of, storage_options
from holdfast_service.settings import Settings
from holdfast_workers.checkpoint.storage import Storage, StorageError, open_storage
from holdfast_workers.spec import RemoteTierSpec

_THREADS = 8
_READERS = 4  # of whole checkpoints, which takes its time: nothing else waits for them

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class StorageNotAnswering(JobError):
    """The storage of the checkpoint failed or was silent; it may answer later."""

    code = "storage_unavailable"


class StorageCalls:
    def __init__(self, settings: Settings) -> None:
        self._deadline_s = settings.storage_deadline_s
        self._secrets = settings.secrets_dir
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="storage-call")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="storage-reader")

    def at(self, uri: str, spec: Mapping[str, Any]) -> Storage:
        """The storage rooted at `uri`, by the resolved spec of a job. Connects to nothing.

        Raises StorageNotAnswering if the secret that the spec names cannot be used.
        """
        try:
            credentials = credentials_of(spec, self._secrets)
        except SecretUnusable as error:
            raise StorageNotAnswering(str(error)) from error
        remote = RemoteTierSpec.model_validate(spec["checkpoint"]["remote"])
        return open_storage(uri, storage_options(remote, credentials))

    async def run(
        self, call: Callable[Given, Answer], *given: Given.args, **named: Given.kwargs
    ) -> Answer:
        """The call's answer. Raises StorageNotAnswering, or what the call raised otherwise."""
        return await _answer(self.start(call, *given, **named), self._deadline_s)

    async def read_through(
        self,
        deadline_s: float,
        call: Callable[Given, Answer],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> Answer:
        """As :meth:`run`, for calls that read whole checkpoints: only a few of them at a time."""
        return await _answer(self.start_reading(call, *given, **named), deadline_s)

    def start(
        self, call: Callable[Given, Answer], *given: Given.args, **named: Given.kwargs
    ) -> asyncio.Future[Answer]:
        """The call under way; who has it sees to its deadline."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, lambda: call(*given, **named))

    def start_reading(
        self, call: Callable[Given, Answer], *given: Given.args, **named: Given.kwargs
    ) -> asyncio.Future[Answer]:
        """As :meth:`start`, for calls that read whole checkpoints."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._readers, lambda: call(*given, **named))


async def _answer(asked: asyncio.Future[Answer], deadline_s: float) -> Answer:
    try:
        return await asyncio.wait_for(asked, deadline_s)
    except TimeoutError as error:
        raise StorageNotAnswering(f"the storage gave no answer in {deadline_s:g} s") from error
    except StorageError as error:
        raise StorageNotAnswering(str(error)) from error
