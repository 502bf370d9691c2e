"""The promises of every storage, on a file system and on an S3 server."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest
from tests.support.checkpoint.s3_server import S3Server

from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import (
    ObjectExists,
    ObjectMissing,
    Storage,
    StorageDenied,
    uri_fault,
    write_small,
)

SIZES = [0, 1, 5 * 1024 * 1024, 5 * 1024 * 1024 + 1, 33 * 1024 * 1024 + 7]


def _content(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def _read_in_pieces(storage: Storage, name: str, piece: int) -> bytes:
    content = bytearray()
    buffer = memoryview(bytearray(piece))
    with storage.open(name) as stream:
        while count := stream.readinto(buffer):
            content += buffer[:count]
    return bytes(content)


@pytest.mark.seconds
@pytest.mark.parametrize("nbytes", SIZES)
def test_an_object_of_any_size_is_read_as_written(root: Storage, nbytes: int) -> None:
    content = _content(nbytes)
    with root.write("deep/in/a.bin") as stream:
        for start in range(0, nbytes, 3_000_001):
            stream.write(content[start : start + 3_000_001])
        assert stream.tell() == nbytes
    assert root.objects() == {"deep/in/a.bin": nbytes}
    got = _read_in_pieces(root, "deep/in/a.bin", 2_000_003)
    assert hashlib.sha256(got).digest() == hashlib.sha256(content).digest()
    assert root.below("deep/in").read("a.bin") == content


def test_a_listing_shows_what_has_changed(root: Storage) -> None:
    write_small(root, "deep/a.bin", b"one")
    write_small(root, "deep/b.bin", b"two")
    write_small(root, "other", b"three")
    first = root.listing()
    assert {name: facts.nbytes for name, facts in first.items()} == root.objects()
    assert sorted(root.listing("deep/")) == ["deep/a.bin", "deep/b.bin"]
    write_small(root, "deep/a.bin", b"six")
    assert root.below("deep").listing("a") != {"a.bin": first["deep/a.bin"]}
    assert root.below("deep").listing("b") == {"b.bin": first["deep/b.bin"]}
    assert root.below("nothing").listing() == {}


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_write_that_raises_leaves_nothing(
    root: Storage, s3_server: S3Server, nbytes: int
) -> None:
    write_small(root, "other", b"stays")
    with pytest.raises(KeyError), root.write("a.bin") as stream:
        stream.write(_content(nbytes))
        raise KeyError("the writer's own")
    assert root.objects() == {"other": 5}
    if root.uri.startswith("s3://"):
        assert s3_server.uploads(root.uri.split("/")[2]) == []
    else:
        assert [path.name for path in Path(root.uri).iterdir()] == ["other"]


def test_a_write_replaces_the_old_object_only_at_its_end(root: Storage) -> None:
    write_small(root, "a", b"before")
    with root.write("a") as stream:
        stream.write(b"after")
        assert root.read("a") == b"before"
    assert root.read("a") == b"after"


def test_a_new_object_is_never_replaced(root: Storage) -> None:
    root.put_new("folder/mark", b"first")
    with pytest.raises(ObjectExists, match="folder/mark"):
        root.put_new("folder/mark", b"second")
    assert root.read("folder/mark") == b"first"
    assert list(root.objects()) == ["folder/mark"]


def test_an_absent_object_is_missing_and_can_be_deleted(root: Storage) -> None:
    with pytest.raises(ObjectMissing, match="absent"):
        root.read("absent")
    with pytest.raises(ObjectMissing), root.open("absent"):
        pass
    root.delete("absent")
    root.below("absent").delete_all()
    assert root.below("absent").objects() == {}
    assert root.folders() == []


def test_folders_exist_only_while_they_contain_objects(root: Storage) -> None:
    for name in ("one/a", "one/deeper/b", "two/c", "loose", "onerous/d"):
        write_small(root, name, b"x")
    assert root.folders() == ["one", "onerous", "two"]
    root.below("one").delete_all()
    assert sorted(root.objects()) == ["loose", "onerous/d", "two/c"]
    root.delete("loose")
    assert sorted(root.objects()) == ["onerous/d", "two/c"]


def test_a_killed_upload_shows_in_folders_and_is_removed(
    s3_root: Storage, s3_server: S3Server
) -> None:
    bucket, _, prefix = s3_root.uri.removeprefix("s3://").partition("/")
    for folder in ("step-1", "step-2"):
        s3_server.client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{folder}/shard")
    assert s3_root.folders() == ["step-1", "step-2"]
    assert s3_root.objects() == {}
    s3_root.below("step-1").delete_all()
    assert s3_server.uploads(bucket) == [f"{prefix}/step-2/shard"]


def test_a_write_without_permission_names_the_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    me = os.geteuid()
    os.seteuid(65534 if me == 0 else me)  # root may write everywhere
    try:
        with pytest.raises(StorageDenied, match="must be able to write"):
            write_small(open_storage(str(tmp_path / "job")), "a", b"x")
    finally:
        os.seteuid(me)


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        ("/data/x", "/data/x"),
        ("file:///data/with%20space", "/data/with space"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
    ],
)
def test_a_uri_opens_its_storage(uri: str, root: str) -> None:
    assert open_storage(uri).uri == root


@pytest.mark.parametrize(
    ("uri", "fault"),
    [
        ("relative/x", "absolute"),
        ("gs://bucket/x", "s3://"),
        ("s3:///x", "no bucket"),
        ("file://host/x", "file:///"),
        ("s3://bucket/x?versionId=1", "query"),
    ],
)
def test_an_unsupported_uri_is_refused_with_a_remedy(uri: str, fault: str) -> None:
    assert fault in str(uri_fault(uri))
    with pytest.raises(ValueError, match=fault.replace("?", ".")):
        open_storage(uri)
