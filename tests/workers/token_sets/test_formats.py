"""Each form of files, from the user's file to tokens, and in a bucket."""

from __future__ import annotations

import contextlib
import gzip
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.data.preparation import Preparation, as_lines

from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec.train import DataSpec, SourceSpec
from holdfast_workers.token_sets.refusals import DataRefused

TEXTS = [f"document {n}: naïve café ☃\n{'words ' * (n % 7)}" for n in range(1, 400)]
ROWS_OF_GROUP = 50
SKIPPED = bytes.fromhex("502a4d18 04000000 01020304")
"""A frame of zstd that has no content, as pzstd writes before each other frame."""
Write = Callable[[Path, list[str]], None]


def _zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def _table(texts: list[str], **columns: Any) -> Any:
    return pa.table({"n": list(range(len(texts))), "text": texts, **columns})


def _parquet(path: Path, texts: list[str]) -> None:
    pq.write_table(_table(texts), path, row_group_size=ROWS_OF_GROUP)


def _dictionary(path: Path, texts: list[str]) -> None:
    encoded = pa.array(texts).dictionary_encode()
    with pa.ipc.new_file(str(path), pa.schema([("text", encoded.type)])) as writer:
        writer.write_table(pa.table({"text": encoded}), max_chunksize=90)


def _stream(path: Path, texts: list[str]) -> None:
    table = _table(texts)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=90)


def _of(path: Path, values: Any) -> None:
    with pa.ipc.new_file(str(path), pa.schema([("text", values.type)])) as writer:
        writer.write_batch(pa.record_batch([values], names=["text"]))


WRITERS: dict[str, Write] = {
    "lines.jsonl": lambda path, texts: void(path.write_bytes(as_lines(texts))),
    "windows.ndjson": lambda path, texts: void(
        path.write_bytes(b"\xef\xbb\xbf" + as_lines(texts).replace(b"\n", b"\r\n\r\n"))
    ),
    "unended.json": lambda path, texts: void(path.write_bytes(as_lines(texts).rstrip())),
    "lines.jsonl.gz": lambda path, texts: void(path.write_bytes(gzip.compress(as_lines(texts)))),
    "joined.jsonl.gz": lambda path, texts: void(
        path.write_bytes(b"".join(gzip.compress(as_lines(half)) for half in halves(texts)))
    ),
    "lines.jsonl.zst": lambda path, texts: void(path.write_bytes(_zstd(as_lines(texts)))),
    "joined.jsonl.zst": lambda path, texts: void(
        path.write_bytes(b"".join(_zstd(as_lines(half)) for half in halves(texts)))
    ),
    "skips.jsonl.zst": lambda path, texts: void(
        path.write_bytes(SKIPPED + _zstd(as_lines(texts)) + SKIPPED)
    ),
    "table.parquet": _parquet,
    "large.parquet": lambda path, texts: void(
        pq.write_table(pa.table({"text": pa.array(texts, pa.large_string())}), path)
    ),
    "stream.arrow": _stream,
    "dictionary.arrow": _dictionary,
    "views.arrow": lambda path, texts: _of(path, pa.array(texts, pa.string_view())),
    "dictionary.parquet": lambda path, texts: void(
        pq.write_table(pa.table({"text": pa.array(texts).dictionary_encode()}), path)
    ),
    "compressed.feather": lambda path, texts: void(
        feather.write_feather(_table(texts), str(path), compression="zstd")
    ),
}


def void(_count: object) -> None:
    """What a call returns is of no use."""


def halves(texts: list[str]) -> tuple[list[str], list[str]]:
    return texts[: len(texts) // 2], texts[len(texts) // 2 :]


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    for name, write in WRITERS.items():
        write(folder / name, TEXTS)
    return folder


@pytest.mark.parametrize("name", WRITERS)
def test_every_document_of_a_file_becomes_tokens_in_order(
    tmp_path: Path, tokenizer_file: Path, name: str
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    WRITERS[name](folder / name, TEXTS)
    for tokenizer in ("bytes", str(tokenizer_file)):
        preparation = Preparation(
            tmp_path / "scratch",
            SourceSpec(path=str(folder / name)),
            DataSpec(tokenizer=tokenizer, bad_records=0),
            part_bytes=3000,
        )
        made = preparation.run()
        assert preparation.documents(made) == TEXTS
        assert (made.text, made.files, made.bad_count) == ("text", 1, 0)
        assert sum(preparation.progress) == made.source_bytes == (folder / name).stat().st_size
        assert min(preparation.progress) >= 0
    plan, _tokenizer = preparation.plan()
    divided = name.endswith((".jsonl", ".ndjson", ".json", "table.parquet"))
    assert (len(plan.parts) > 1) == divided


@settings(max_examples=150, derandomize=True)
@given(
    name=st.sampled_from(["lines.jsonl.gz", "table.parquet", "stream.arrow", "dictionary.arrow"]),
    place=st.floats(0, 0.999),
    bit=st.integers(0, 7),
    cut=st.booleans(),
)
def test_a_damaged_file_is_refused_or_loses_no_row_silently(
    whole_files: Path, name: str, place: float, bit: int, cut: bool
) -> None:
    content = bytearray((whole_files / name).read_bytes())
    at = int(place * len(content))
    content[at] ^= 1 << bit
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content[:at] if cut else content)
        preparation = Preparation(
            Path(folder, "scratch"), SourceSpec(path=str(path)), DataSpec(bad_records=0.9)
        )
        with contextlib.suppress(DataRefused):
            made = preparation.run()
            assert not cut
            assert made.documents + made.bad_count == len(TEXTS)


@pytest.mark.parametrize(
    ("written", "damage"),
    [(2 * ROWS_OF_GROUP, 2 * 5), (ord("t"), 0xFD)],
    ids=["number of rows", "name of the column"],
)
def test_a_damaged_end_of_a_table_is_refused_or_loses_no_row_silently(
    tmp_path: Path, whole_files: Path, written: int, damage: int
) -> None:
    sound = (whole_files / "table.parquet").read_bytes()
    footer = len(sound) - 8 - int.from_bytes(sound[-8:-4], "little")
    places = [at for at in range(footer, len(sound)) if sound[at] == written]
    refused = 0
    for at in places:
        path = tmp_path / f"{at}.parquet"
        path.write_bytes(sound[:at] + bytes([damage]) + sound[at + 1 :])
        try:
            made = Preparation(tmp_path / "scratch", SourceSpec(path=str(path))).run()
            assert made.documents == len(TEXTS)
        except DataRefused as error:
            assert str(path) in str(error)
            refused += 1
    assert refused >= 2


def test_a_file_of_text_is_one_document(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    (folder / "inner").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, text in {"b.py": "b = 1\r\n", "inner/a.md": "# ☃", ".git/x.py": "no"}.items():
        (folder / name).write_bytes(text.encode())
    preparation = Preparation(tmp_path / "scratch", SourceSpec(path=str(folder)))
    made = preparation.run()
    assert preparation.documents(made) == ["b = 1\r\n", "# ☃"]
    assert made.text == ""


def test_files_of_several_kinds_keep_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    names = sorted(WRITERS)
    for name in names:
        WRITERS[name](folder / name, [f"{name} {n}" for n in range(20)])
    preparation = Preparation(
        tmp_path / "scratch", SourceSpec(path=f"{folder}/*.*"), part_bytes=500
    )
    expected = [f"{name} {n}" for name in names for n in range(20)]
    assert preparation.documents(preparation.run()) == expected


def test_a_saved_data_set_is_read_in_its_own_order(tmp_path: Path) -> None:
    texts = [f"row {n}" for n in range(120)]
    saved = datasets.Dataset.from_dict({"n": list(range(120)), "text": texts})
    saved.select(range(119, 19, -1)).save_to_disk(tmp_path / "saved", num_shards=3)
    preparation = Preparation(tmp_path / "scratch", SourceSpec(path=str(tmp_path / "saved")))
    made = preparation.run()
    assert preparation.documents(made) == texts[:19:-1]
    assert made.files == 3


@pytest.mark.seconds
def test_a_source_in_a_bucket_is_prepared_into_a_bucket(
    tmp_path: Path, s3_server: S3Server, tokenizer_file: Path
) -> None:
    bucket = s3_server.new_bucket()
    texts = [f"{n} in a bucket ☃" for n in range(60)]
    keys = {f"web/{name}": name for name in WRITERS} | {"web/deep/er/odd #?.jsonl": "lines.jsonl"}
    for key, name in keys.items():
        WRITERS[name](tmp_path / name, [f"{name}: {text}" for text in texts])
        s3_server.client.upload_file(str(tmp_path / name), bucket, key)
    s3_server.client.put_object(Bucket=bucket, Key="web/deep/", Body=b"")
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved", num_shards=2)
    for path in (tmp_path / "saved").iterdir():
        s3_server.client.upload_file(str(path), bucket, f"saved/{path.name}")
    options = StorageOptions(endpoint=s3_server.endpoint, credentials=CREDENTIALS)

    def documents(path: str) -> list[str]:
        preparation = Preparation(
            tmp_path / "scratch",
            SourceSpec(path=f"s3://{bucket}/{path}"),
            DataSpec(tokenizer=str(tokenizer_file)),
            options,
            storage=open_storage(f"s3://{bucket}/prepared", options),
        )
        return preparation.documents(preparation.run())

    in_order = [f"{keys[key]}: {text}" for key in sorted(keys) for text in texts]
    assert documents("web") == documents("web/**/*.*") == in_order
    assert documents("saved") == texts
    assert documents("web/deep/er/odd #?.jsonl") == [f"lines.jsonl: {text}" for text in texts]
    assert not list((tmp_path / "scratch").iterdir())
