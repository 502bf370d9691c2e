from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast_service.errors import StorageUnavailable
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.remote_tier.storage_calls import StorageCalls
from holdfast_service.settings import Settings
from holdfast_workers.checkpoint.storage import TransientStorageError


def _spec(**remote: Any) -> dict[str, Any]:
    document = {"name": "x", "checkpoint": {"remote": remote}}
    return JobSpec.model_validate(document).model_dump(mode="json")


async def test_a_hanging_call_times_out_and_blocks_no_other_call(tmp_path: Path) -> None:
    calls = StorageCalls(Settings(data_dir=tmp_path, storage_deadline_s=0.2))
    over = threading.Event()
    try:
        with pytest.raises(StorageUnavailable, match=r"0\.2 s"):
            await calls.run(over.wait)
        assert await calls.run(lambda: 7) == 7
    finally:
        over.set()


async def test_reads_of_whole_checkpoints_block_no_other_call(tmp_path: Path) -> None:
    calls = StorageCalls(Settings(data_dir=tmp_path, storage_deadline_s=10.0))
    over = threading.Event()
    try:
        reading = [calls.start_reading(over.wait) for _ in range(20)]
        assert await calls.run(lambda: 7) == 7
        over.set()
        assert all(await asyncio.gather(*reading))
    finally:
        over.set()


async def test_storage_errors_reach_the_caller(tmp_path: Path) -> None:
    calls = StorageCalls(Settings(data_dir=tmp_path))

    def fails() -> None:
        raise TransientStorageError("s3://bucket", "503 slow down")

    with pytest.raises(StorageUnavailable, match="slow down"):
        await calls.run(fails)
    with pytest.raises(StorageUnavailable, match="no secret 'mine'"):
        calls.storage_at("s3://bucket/x", _spec(secret="mine", uri="s3://bucket"))
    assert calls.storage_at("s3://bucket/x", _spec()).uri == "s3://bucket/x"
