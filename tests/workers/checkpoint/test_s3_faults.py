"""Faults of a bucket: errors, silence, slow and truncated transfers, lost responses.

A real S3 server behind a proxy that injects the faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.checkpoint.saved_worlds import layout_of, save_world
from tests.support.faults.flaky_proxy import FlakyProxy

from holdfast_workers.checkpoint.load import load_state
from holdfast_workers.checkpoint.manifest import verify
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import (
    ObjectExists,
    Storage,
    StorageDenied,
    TransientStorageError,
    write_small,
)
from holdfast_workers.protocol.processes import StorageOptions

MIB = 1024 * 1024
LARGE = 17 * MIB  # four parts
Break = Callable[[FlakyProxy], object]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FlakyProxy]:
    proxy = FlakyProxy(s3_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return s3_server.new_bucket()


@pytest.fixture
def root(proxy: FlakyProxy, bucket: str) -> Storage:
    options = StorageOptions(
        endpoint=proxy.endpoint,
        credentials=CREDENTIALS,
        connect_timeout_s=0.5,
        read_timeout_s=0.5,
        part_timeout_s=5.0,
        patience_s=5.0,
        attempts=8,
        part_bytes=5 * MIB,
        in_flight=2,
    )
    return open_storage(f"s3://{bucket}/job", options)


TRANSIENT_FAULTS: dict[str, Break] = {
    "500": lambda proxy: proxy.add("status", times=2),
    "slow_down": lambda proxy: proxy.add("status", times=2, status=503, code="SlowDown"),
    "silence": lambda proxy: proxy.add("silence", times=1),
    "reset": lambda proxy: proxy.add("reset", times=2),
    "cut_upload": lambda proxy: proxy.add("cut_upload", method="PUT", times=2),
    "part_fails": lambda proxy: proxy.add("status", contains="partNumber=2", times=2),
    "part_answer_lost": lambda proxy: proxy.add("lose_answer", contains="partNumber", times=2),
    "completion_answer_lost": lambda proxy: proxy.add(
        "lose_answer", method="POST", contains="uploadId", times=2
    ),
    "cut_download": lambda proxy: proxy.add("cut_download", method="GET", times=2),
    "slow_download": lambda proxy: proxy.add("slow", method="GET", times=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSIENT_FAULTS)
def test_a_large_object_survives_transient_faults(
    root: Storage, proxy: FlakyProxy, s3_server: S3Server, bucket: str, name: str
) -> None:
    content = random.Random(name).randbytes(LARGE)
    TRANSIENT_FAULTS[name](proxy)
    write_small(root, "large", content)
    assert s3_server.uploads(bucket) == []
    if name.endswith("download"):
        assert proxy.unused() == 1  # the download fault is still pending
    assert root.read("large") == content
    assert proxy.unused() == 0


@pytest.mark.slow
@pytest.mark.parametrize("action", ["status", "silence", "reset"])
def test_an_unreachable_bucket_raises_in_time(
    root: Storage, proxy: FlakyProxy, action: str
) -> None:
    proxy.add(action)
    with pytest.raises(TransientStorageError, match="job"):
        write_small(root, "large", bytes(LARGE))
    with pytest.raises(TransientStorageError):
        root.objects()


@pytest.mark.slow
def test_an_upload_that_fails_permanently_is_aborted(
    root: Storage, proxy: FlakyProxy, s3_server: S3Server, bucket: str
) -> None:
    proxy.add("status", contains="partNumber=3")
    with pytest.raises(TransientStorageError):
        write_small(root, "large", bytes(LARGE))
    assert s3_server.uploads(bucket) == []
    assert s3_server.objects(bucket) == []


@pytest.mark.slow
def test_an_upload_that_could_not_be_aborted_is_removed_later(
    root: Storage, proxy: FlakyProxy, s3_server: S3Server, bucket: str
) -> None:
    proxy.add("reset", contains="partNumber=3")
    proxy.add("reset", method="DELETE")
    with pytest.raises(TransientStorageError):
        write_small(root, "large", bytes(LARGE))
    assert s3_server.uploads(bucket) == ["job/large"]
    proxy.heal()
    root.delete_broken()
    assert s3_server.uploads(bucket) == []


def test_an_upload_whose_creation_response_was_lost_is_removed_later(
    root: Storage, proxy: FlakyProxy, s3_server: S3Server, bucket: str
) -> None:
    proxy.add("lose_answer", method="POST", times=1)
    write_small(root, "large", bytes(LARGE))
    assert s3_server.uploads(bucket) == ["job/large"]
    root.delete_broken()
    assert s3_server.uploads(bucket) == []
    assert root.objects() == {"large": LARGE}


def test_refused_credentials_are_not_retried(root: Storage, proxy: FlakyProxy) -> None:
    proxy.add("status", status=403, code="SignatureDoesNotMatch")
    with pytest.raises(StorageDenied, match="SignatureDoesNotMatch"):
        root.put_new("a", b"x")
    assert len(proxy.requests) == 1


def test_a_new_object_exists_although_its_response_was_lost(
    root: Storage, proxy: FlakyProxy
) -> None:
    proxy.add("lose_answer", method="PUT", times=1)
    with pytest.raises(ObjectExists):
        root.put_new("manifest", b"ours")
    assert root.read("manifest") == b"ours"


@pytest.mark.slow
def test_a_checkpoint_is_saved_and_loaded_despite_frequent_faults(
    root: Storage, proxy: FlakyProxy
) -> None:
    """Many requests fail in different ways; the whole checkpoint arrives nevertheless."""
    actions = {"status": 5, "reset": 7, "lose_answer": 6, "cut_upload": 8, "cut_download": 9}
    for action, every in actions.items():
        proxy.add(action, every=every, after_bytes=300)
    mesh = {"dp_shard": 2, "tp": 1}
    checkpoint = root.below(save_world(root, 7, 1, mesh).folder)
    verify(checkpoint)
    for rank in range(2):
        layout = layout_of(mesh, rank)
        payload = memoryview(bytearray(layout.payload_bytes))
        assert load_state(checkpoint, layout, payload, mesh=mesh, rank=rank) == []
    assert all(rule.used for rule in proxy.rules)
