"""Files that cannot be used: each is refused, or a record left out, in a sentence with file, place
and remedy."""

from __future__ import annotations

import gzip
import json
import os
import struct
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet.encryption import (
    CryptoFactory,
    EncryptionConfiguration,
    KmsClient,
    KmsConnectionConfig,
)
from tests.support.data.preparation import END, Preparation, as_lines

from holdfast_workers.spec.train import DataSpec, SourceSpec
from holdfast_workers.token_sets import documents
from holdfast_workers.token_sets.prepare import check_share
from holdfast_workers.token_sets.refusals import DataRefused, LibraryMissing

GOOD = as_lines(f"a good document {n}" for n in range(20))
TEXTS = [f"a good document {n}" for n in range(20)]
INVALID = pa.array([*TEXTS[:6], b"\xffbad", "x", "y"], pa.large_binary()).view(pa.large_string())


@dataclass(frozen=True)
class Bad:
    """Content of one file, and what the refusal must name."""

    file: str
    content: bytes | Callable[[Path], object]
    place: str
    remedy: str


def _lines(*lines: bytes) -> bytes:
    return GOOD + b"".join(line + b"\n" for line in lines)


def _parquet(**columns: Any) -> Callable[[Path], object]:
    return lambda path: pq.write_table(pa.table(columns), path)


def _cut_parquet(path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS}), path)
    path.write_bytes(path.read_bytes()[:-20])


def _damaged_parquet(path: Path) -> None:
    pq.write_table(pa.table({"text": [f"{n}" * 500 for n in range(99)]}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[60:200] = bytes(140)
    path.write_bytes(content)


class _KeyService(KmsClient):  # type: ignore[misc]
    """Gives each key as it is."""

    def __init__(self, _config: KmsConnectionConfig) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return b64encode(key_bytes)

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return b64decode(wrapped_key)


def _encrypted_parquet(*, plaintext_footer: bool) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        properties = CryptoFactory(_KeyService).file_encryption_properties(
            KmsConnectionConfig(),
            EncryptionConfiguration(
                footer_key="footer",
                column_keys={"column": ["text"]},
                plaintext_footer=plaintext_footer,
            ),
        )
        table = pa.table({"text": TEXTS})
        with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
            writer.write_table(table)

    return write


def _arrow(path: Path) -> bytes:
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return path.read_bytes()


def _cut_arrow(bytes_of_end: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(_arrow(path)[:-bytes_of_end])


def _damaged_arrow(path: Path) -> None:
    content = _arrow(path)
    offsets = struct.pack("<3i", 0, 17, 34)
    assert offsets in content
    path.write_bytes(content.replace(offsets, struct.pack("<3i", 0, 2**31 - 1, 34)))


def _arrow_of(path: Path, values: Any) -> None:
    with pa.ipc.new_file(str(path), pa.schema([("text", values.type)])) as writer:
        writer.write_batch(pa.record_batch([values], names=["text"]))


def _dictionary(*more_indices: int) -> Callable[[Path], object]:
    known = INVALID.dictionary_encode()
    indices = pa.array([*known.indices.to_pylist(), *more_indices], pa.int32())
    values = pa.DictionaryArray.from_arrays(indices, known.dictionary, safe=False)
    return lambda path: _arrow_of(path, values)


def _views(path: Path) -> None:
    values = pa.array([b"x", b"\xffbad"], pa.binary_view()).view(pa.string_view())
    _arrow_of(path, values)


def _long_arrow(path: Path) -> None:
    table = pa.table({"text": [*TEXTS[1:], "x" * 5000]})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def _duplicated(path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


CASES = {
    "invalid_utf8": Bad("a.jsonl", _lines(b'{"text": "\xff"}'), "row 21: its byte 11", "UTF-8"),
    "no_json": Bad("a.jsonl", _lines(b"{text: 1}"), "row 21: it is no JSON", "Correct the files"),
    "cut_line": Bad("a.jsonl", GOOD[:-9], "row 20: it is no JSON", "raise data.bad_records"),
    "no_object": Bad("a.jsonl", _lines(b'"text"'), "row 21", "write one object per line"),
    "missing_key": Bad(
        "a.jsonl", _lines(b'{"body": "x"}'), "row 21: it has no key 'text', but 'body'", "`text`"
    ),
    "null": Bad("a.jsonl", _lines(b'{"text": null}'), "row 21: its text is null", "Correct"),
    "nested_value": Bad(
        "a.jsonl", _lines(b'{"text": {"a": 1}}'), "row 21: its text is no string but an object", "C"
    ),
    "number": Bad("a.jsonl", _lines(b'{"text": 1.5}'), "no string but a number", "Correct"),
    "empty_text": Bad("a.jsonl", _lines(b'{"text": ""}'), "row 21: its text is empty", "Correct"),
    "nul": Bad("a.jsonl", _lines(rb'{"text": "a\u0000b"}'), "row 21: its text has a NUL", "bytes"),
    "half_a_pair": Bad(
        "a.jsonl", _lines(rb'{"text": "\ud83d"}'), "row 21: its text has half of a surrogate", "C"
    ),
    "too_deep": Bad("a.jsonl", _lines(b"[" * 100_000), "row 21: it cannot be read as JSON", "C"),
    "utf16": Bad("a.jsonl", GOOD.decode().encode("utf-16"), "row 1: its byte 1", "UTF-8"),
    "array": Bad("a.json", b'[{"text": "x"}]', "a.json is a JSON array", "jq -c '.[]'"),
    "long_line": Bad("a.jsonl", _lines(b"x" * 5000), "at byte 790", "write one object per line"),
    "empty_file": Bad("a.txt", b"", "a.txt, row 1: its text is empty", "Correct the files"),
    "text_invalid": Bad("a.md", b"ab\xe9", "a.md, row 1: its byte 3 is not UTF-8", "in UTF-8"),
    "text_too_long": Bad("a.txt", b"x" * 5000, "a.txt is one document of over", "JSON lines"),
    "row_too_long": Bad(
        "a.parquet", _parquet(text=["a", "é" * 2500]), "row 2: its text has over 4,000", "divide it"
    ),
    "row_of_arrow_too_long": Bad("a.arrow", _long_arrow, "row 20: its text has over", "divide it"),
    "wrong_key": Bad(
        "a.jsonl", as_lines("x" * 2000, "body"), "2,000 records is usable, such as row 1:", "`text`"
    ),
    "cut_gzip": Bad(
        "a.jsonl.gz", gzip.compress(GOOD)[:-30], "a.jsonl.gz is damaged or cut off", "copy it again"
    ),
    "damaged_gzip": Bad(
        "a.jsonl.gz", gzip.compress(GOOD)[:40] + bytes(60), "a.jsonl.gz is damaged", "copy it again"
    ),
    "gzip_named_zstd": Bad(
        "a.jsonl.zst", gzip.compress(GOOD), "is zstd by its name and gzip by its content", "suffix"
    ),
    "gzip_named_lines": Bad(
        "a.jsonl", gzip.compress(GOOD), "JSON lines by its name and gzip by its content", "suffix"
    ),
    "lines_named_gzip": Bad("a.jsonl.gz", GOOD, "a.jsonl.gz is no gzip file", "the suffix of its"),
    "empty_gzip": Bad("a.jsonl.gz", b"", "a.jsonl.gz is empty", "write it again"),
    "cut_parquet": Bad("a.parquet", _cut_parquet, "a.parquet is damaged or cut off", "write it"),
    "damaged_parquet": Bad("a.parquet", _damaged_parquet, "a.parquet is damaged", "write it again"),
    "encrypted_parquet": Bad(
        "a.parquet",
        _encrypted_parquet(plaintext_footer=False),
        "a.parquet is encrypted Parquet",
        "write it without encryption",
    ),
    "encrypted_column": Bad(
        "a.parquet",
        _encrypted_parquet(plaintext_footer=True),
        "a.parquet is damaged or cut off, or encrypted",
        "write it again, without encryption",
    ),
    "no_parquet": Bad("a.parquet", GOOD, "a.parquet is no Parquet file", "the suffix of its kind"),
    "wrong_column": Bad(
        "a.parquet", _parquet(texts=TEXTS, n=TEXTS), "'texts', 'n': did you mean 'texts'", "`text`"
    ),
    "nested_column": Bad(
        "a.parquet", _parquet(text=[["a"], ["b"]]), "column 'text' is nested (list", "a column of s"
    ),
    "struct_column": Bad(
        "a.parquet", _parquet(text=[{"role": "x"}]), "column 'text' is nested (struct", "a column o"
    ),
    "column_of_numbers": Bad(
        "a.parquet", _parquet(text=[1, 2]), "'text' has the type int64, not string", "a column of s"
    ),
    "invalid_in_parquet": Bad(
        "a.parquet", _parquet(text=INVALID), "a.parquet, row 7: its byte 1 is not UTF-8", "Correct"
    ),
    "invalid_in_dictionary": Bad(
        "a.arrow", _dictionary(), "a.arrow, row 7: its byte 1 is not UTF-8", "Correct"
    ),
    "invalid_in_dictionary_of_parquet": Bad(
        "a.parquet",
        _parquet(text=INVALID.dictionary_encode()),
        "a.parquet, row 7: its byte 1 is not UTF-8",
        "Correct",
    ),
    "invalid_in_views": Bad(
        "a.arrow", _views, "a.arrow, row 2: its byte 1 is not UTF-8", "Correct"
    ),
    "damaged_dictionary": Bad("a.arrow", _dictionary(99), "a.arrow is damaged", "write it again"),
    "null_in_parquet": Bad(
        "a.parquet", _parquet(text=["a", None]), "a.parquet, row 2: its text is null", "Correct"
    ),
    "no_rows": Bad("a.parquet", _parquet(text=pa.array([], pa.string())), "no document", "check"),
    "cut_arrow": Bad("a.arrow", _cut_arrow(100), "a.arrow is cut off", "copy it again"),
    "arrow_without_end": Bad("a.arrow", _cut_arrow(8), "a.arrow is cut off", "copy it again"),
    "damaged_arrow": Bad("a.arrow", _damaged_arrow, "a.arrow is damaged", "write it again"),
    "joined_arrow": Bad(
        "a.arrow", lambda path: path.write_bytes(_arrow(path) * 2), "goes on after its end", "write"
    ),
    "two_columns": Bad("a.arrow", _duplicated, "several columns 'text'", "one of each name"),
    "zip": Bad("a.txt", b"PK\x03\x04rest", "text by its name and zip by its content", "suffix"),
    "unknown_kind": Bad("a.csv", b"text\nx\n", "a.csv: its kind is not known", "convert or rename"),
    "packed_parquet": Bad(
        "a.parquet.gz", b"", "a.parquet.gz: its kind is not", "convert or rename"
    ),
    "no_suffix": Bad("LICENSE", b"x", "LICENSE: its kind is not known by its suffix", "convert"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_file_is_refused_with_its_place_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    bad = CASES[case]
    path = tmp_path / bad.file
    if isinstance(bad.content, bytes):
        path.write_bytes(bad.content)
    else:
        bad.content(path)
    if "long" in case:
        monkeypatch.setattr(documents, "MOST_DOCUMENT_BYTES", 4000)
        monkeypatch.setattr("holdfast_workers.token_sets.line_records._READ_BYTES", 100)
    error = _refusal(tmp_path, str(path))
    assert (bad.file in error) == (case != "no_rows")
    assert not error.startswith("source")  # the caller names it
    assert bad.place in error
    assert bad.remedy in error


def _refusal(tmp_path: Path, path: str, **data: Any) -> str:
    preparation = Preparation(tmp_path / "scratch", SourceSpec(path=path), DataSpec(**data))
    with pytest.raises(DataRefused) as raised:
        preparation.run()
    return str(raised.value)


def test_a_row_is_counted_from_the_beginning_of_a_divided_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [*as_lines(f"{n}" for n in range(300)).splitlines()]
    lines[250] = b"no json"
    lines[251] = b'{"text": ""}'
    path.write_bytes(b"\n".join(lines))
    preparation = Preparation(
        tmp_path / "scratch", SourceSpec(path=str(path)), DataSpec(bad_records=0.1), part_bytes=97
    )
    made = preparation.run()
    assert [(bad.file, bad.row) for bad in made.bad] == [(str(path), 251), (str(path), 252)]
    assert preparation.documents(made) == [f"{n}" for n in range(300) if n not in (250, 251)]


def test_a_row_is_counted_from_the_beginning_of_a_divided_table(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [None if n == 250 else f"{n}" for n in range(300)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=11)
    preparation = Preparation(
        tmp_path / "scratch", SourceSpec(path=str(path)), DataSpec(bad_records=0.1), part_bytes=700
    )
    assert [bad.row for bad in preparation.run().bad] == [251]
    assert len(preparation.plan()[0].parts) > 3


def test_unusable_records_up_to_the_share_are_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(_lines(b"{", b"", b"  ", b'{"text": null}'))
    share = 2 / 22
    made = Preparation(
        tmp_path / "scratch", SourceSpec(path=str(path)), DataSpec(bad_records=share)
    ).run()
    assert (made.documents, made.bad_count) == (20, 2)
    assert [bad.row for bad in made.bad] == [21, 24]
    assert "2 of 22 records" in _refusal(tmp_path, str(path), bad_records=share - 1e-9)
    with pytest.raises(DataRefused, match="2 of 22 records are unusable"):
        check_share(made, share - 1e-9)
    check_share(made, share)


def test_one_record_is_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(_lines(b"{"))
    assert _refusal(tmp_path, str(path), bad_records=0).startswith("1 of 21 records is unusable,")
    path.write_bytes(b"{")
    assert _refusal(tmp_path, str(path)).startswith("1 of 1 record is unusable, more than")


def test_a_higher_share_goes_on_with_the_parts_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(_lines(b"{"))
    strict, patient = (
        Preparation(tmp_path / "scratch", SourceSpec(path=str(path)), DataSpec(bad_records=share))
        for share in (0.0, 0.5)
    )
    assert strict.plan()[0].key == patient.plan()[0].key


def test_a_document_end_inside_a_text_is_no_second_document(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + as_lines([f"one{END}two"]))
    error = _refusal(tmp_path, str(path), tokenizer=str(tokenizer_file))
    assert "row 21: its text contains the document end '<|end|>': remove it" in error


@pytest.mark.parametrize(
    ("files", "path", "place", "remedy"),
    [
        ((), "absent.jsonl", "it does not exist on this node", "every node must have it"),
        (("a.txt",), "*.jsonl", "it matches no file", "check the path"),
        (("a.txt",), "[z-a].txt", "'[z-a].txt' is no glob", "correct its brackets"),
        (("d/a.bin",), "d", "it has no file of a known kind", "JSON lines (.jsonl"),
        (
            ("d/a.jsonl", "d/LICENSE"),
            "d",
            "1 file (LICENSE) of a kind",
            "name the files that are meant",
        ),
        (("d/a.jsonl", "d/README.md"), "d", "(README.md) of text", "**/*.parquet"),
        ((), "d", "it does not exist", "every node"),
    ],
)
def test_a_path_that_is_not_clear_is_refused(
    tmp_path: Path, files: tuple[str, ...], path: str, place: str, remedy: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(GOOD)
    error = _refusal(tmp_path, str(tmp_path / path))
    assert place in error
    assert remedy in error


def test_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    assert "pipe.txt is no regular file" in _refusal(tmp_path, f"{tmp_path}/*.txt")
    (tmp_path / "gone.md").symlink_to(tmp_path / "nothing")
    assert "gone.md: No such file" in _refusal(tmp_path, f"{tmp_path}/*.md")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "again").symlink_to(tmp_path / "d")
    assert "again is a link to a folder that it lies in" in _refusal(tmp_path, f"{tmp_path}/d")
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_bytes(GOOD)
    assert "the name is not UTF-8: rename" in _refusal(tmp_path, f"{tmp_path}/*.jsonl")
    assert "write an absolute path" in _refusal(tmp_path, "data/*.jsonl")


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_file_under_two_names_is_refused(
    tmp_path: Path, link: Callable[[Path, Path], object]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    link(tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    error = _refusal(tmp_path, f"{tmp_path}/*.jsonl")
    assert f"{tmp_path}/a.jsonl and {tmp_path}/b.jsonl are links to one file" in error
    assert "remove one of them, or name" in error


def test_a_damaged_saved_data_set_is_refused(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    saved = tmp_path / "saved"
    error = _refusal(tmp_path, str(saved))
    assert f"name the folder of one: {saved}/train, {saved}/test" in error
    (saved / "test" / "data-00000-of-00001.arrow").unlink()
    assert "data-00000-of-00001.arrow: No such file" in _refusal(tmp_path, f"{saved}/test")
    (saved / "test" / "dataset_info.json").unlink()
    assert "has no dataset_info.json: save the" in _refusal(tmp_path, f"{saved}/test")
    sound = (saved / "train" / "state.json").read_bytes()
    (saved / "train" / "state.json").write_text("{}")
    error = _refusal(tmp_path, f"{saved}/train")
    assert "state.json is none of the library `datasets`" in error
    assert "save_to_disk, or name its files by a glob" in error
    state = json.loads(sound)
    for key in ("_indices_data_files", "_indices_files"):
        selected = {**state, key: [{"filename": "indices.arrow"}]}
        (saved / "train" / "state.json").write_text(json.dumps(selected))
        assert "save it again after flatten_indices()" in _refusal(tmp_path, f"{saved}/train")
    files = [{"filename": "data-00000-of-00001.arrow"}] * 2
    (saved / "train" / "state.json").write_text(json.dumps({"_data_files": files}))
    assert "state.json names a file twice: save" in _refusal(tmp_path, f"{saved}/train")
    files = [{"filename": "../../outside.arrow"}]
    (saved / "train" / "state.json").write_text(json.dumps({"_data_files": files}))
    assert "state.json names no files beside it" in _refusal(tmp_path, f"{saved}/train")


def test_a_node_without_the_libraries_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_file: Path
) -> None:
    _parquet(text=TEXTS)(tmp_path / "a.parquet")
    for name in ("pyarrow", "pyarrow.parquet", "tokenizers"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    for data in (DataSpec(), DataSpec(tokenizer=str(tokenizer_file))):
        spec = SourceSpec(path=str(tmp_path / "a.parquet"))
        with pytest.raises(LibraryMissing, match=r"pip install 'holdfast-train\[data\]'"):
            Preparation(tmp_path / "scratch", spec, data).run()
