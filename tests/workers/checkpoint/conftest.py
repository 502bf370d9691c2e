from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server

from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.protocol.processes import StorageOptions


@pytest.fixture
def s3_root(s3_server: S3Server) -> Storage:
    """A bucket with small parts, so that small objects have several; S3's minimum is 5 MiB."""
    options = StorageOptions(
        endpoint=s3_server.endpoint, credentials=CREDENTIALS, part_bytes=5 * 1024 * 1024
    )
    return open_storage(f"s3://{s3_server.new_bucket()}/some/job", options)


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "job"))
    storage: Storage = request.getfixturevalue("s3_root")
    return storage
