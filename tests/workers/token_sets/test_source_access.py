"""What fails beside the content: storages and disks. It is never taken for a fault of the data."""

from __future__ import annotations

import errno
import gzip
import io
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.data.preparation import Preparation, as_lines

from holdfast_workers.checkpoint.s3_transfers import Download
from holdfast_workers.checkpoint.storage import StorageDenied, TransientStorageError
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec.train import SourceSpec
from holdfast_workers.token_sets.prepare import make_part
from holdfast_workers.token_sets.refusals import DataRefused


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt", "a.parquet"])
def test_a_bucket_that_goes_away_in_a_file_is_no_fault_of_the_file(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bucket = s3_server.new_bucket()
    content = as_lines(str(n) * 50 for n in range(9000))
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": [str(n) for n in range(9000)]}), path)
    else:
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    s3_server.client.upload_file(str(path), bucket, name)
    options = StorageOptions(endpoint=s3_server.endpoint, credentials=CREDENTIALS)
    preparation = Preparation(
        tmp_path / "scratch", SourceSpec(path=f"s3://{bucket}/{name}"), options=options
    )
    calls = []

    def away(self: Download, buffer: memoryview) -> int:
        calls.append(len(buffer))
        if len(calls) > 1:  # after the head
            raise TransientStorageError(f"s3://{bucket}", "it is away")
        return whole(self, buffer)

    whole: Callable[[Download, memoryview], int] = Download.readinto
    with monkeypatch.context() as patched:
        patched.setattr(Download, "readinto", away)
        with pytest.raises(TransientStorageError, match="it is away"):
            preparation.run()
    assert not list((tmp_path / "scratch").glob("*"))
    assert preparation.run().documents > 0


@pytest.mark.parametrize("fault", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
@pytest.mark.parametrize("call", ["stat", "lstat", "scandir", "open"])
@pytest.mark.parametrize("planned", [False, True])
def test_a_passing_fault_of_a_file_system_is_no_fault_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int, call: str, planned: bool
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(as_lines(["x"]))
    preparation = Preparation(tmp_path / "scratch", SourceSpec(path=str(folder)))
    plan = preparation.plan()
    where = io if call == "open" else os
    sound = getattr(where, call)

    def failing(path: object, *args: object, **options: object) -> object:
        if isinstance(path, Path | str | os.DirEntry) and os.fspath(path).startswith(str(folder)):
            raise OSError(fault, os.strerror(fault), os.fspath(path))
        return sound(path, *args, **options)

    def prepared() -> int:
        return (preparation.carry_out(*plan) if planned else preparation.run()).documents

    monkeypatch.setattr(where, call, failing)
    if call == "lstat" or (planned and call == "scandir"):
        assert prepared() == 1  # it is not needed
        return
    expected = DataRefused if fault == errno.EACCES else TransientStorageError
    with pytest.raises(expected, match=os.strerror(fault)):
        prepared()


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    for path in ("x" * 300, "loop.txt"):
        (tmp_path / "loop.txt").unlink(missing_ok=True)
        (tmp_path / "loop.txt").symlink_to("loop.txt")
        with pytest.raises(DataRefused, match="the nodes must be able to read it, as user"):
            Preparation(tmp_path, SourceSpec(path=str(tmp_path / path))).run()


def test_a_copy_of_an_object_is_gone_with_its_process(tmp_path: Path, s3_server: S3Server) -> None:
    bucket, scratch = s3_server.new_bucket(), tmp_path / "scratch"
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    s3_server.client.upload_file(str(tmp_path / "a.parquet"), bucket, "a.parquet")
    preparation = Preparation(
        scratch,
        SourceSpec(path=f"s3://{bucket}/a.parquet"),
        options=StorageOptions(endpoint=s3_server.endpoint, credentials=CREDENTIALS),
    )
    plan, tokenizer = preparation.plan()
    names: list[Path] = []
    copies: list[Path] = []

    def look(_nbytes: int) -> None:
        names.extend(scratch.iterdir())
        opened = [path for path in Path("/proc/self/fd").iterdir() if path.is_file()]
        copies.extend(path for path in map(Path.readlink, opened) if path.parent == scratch)

    make_part(
        plan, plan.parts[0], tokenizer, preparation.storage, preparation.options, scratch, look
    )
    assert copies
    assert not names


def test_a_bucket_that_may_not_be_read_is_named(s3_server: S3Server, tmp_path: Path) -> None:
    options = StorageOptions(
        endpoint=s3_server.endpoint.replace("127.0.0.1", "localhost"), refuse_local=True
    )
    source = SourceSpec(path=f"s3://{s3_server.new_bucket()}/a.jsonl")
    with pytest.raises(StorageDenied, match="an address of this machine"):
        Preparation(tmp_path, source, options=options).run()


def test_a_full_disk_for_copies_is_a_failure_that_is_named(
    small_file_system: Path, tmp_path: Path, s3_server: S3Server
) -> None:
    bucket = s3_server.new_bucket()
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x"]}), path)
    path.write_bytes(b"PAR1" + bytes(9_000_000) + path.read_bytes())
    s3_server.client.upload_file(str(path), bucket, "a.parquet")
    preparation = Preparation(
        small_file_system / "scratch",
        SourceSpec(path=f"s3://{bucket}/a.parquet"),
        options=StorageOptions(endpoint=s3_server.endpoint, credentials=CREDENTIALS),
    )
    with pytest.raises(TransientStorageError, match="No space left"):
        preparation.run()
    assert not list((small_file_system / "scratch").iterdir())
