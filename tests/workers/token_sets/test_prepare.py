"""Preparation as a whole: nothing is lost or doubled, however it is divided or interrupted."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.data.preparation import END, Preparation, as_lines
from tests.support.faults.faulty_storage import Bucket, MemoryStorage

from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import (
    ObjectMissing,
    ObjectWriter,
    Storage,
    TransientStorageError,
    write_small,
)
from holdfast_workers.data.token_set import MANIFEST, BadTokenSet, shard_digest
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec.train import DataSpec, SourceSpec
from holdfast_workers.token_sets import prepare
from holdfast_workers.token_sets.prepare import (
    finish,
    finished_parts,
    make_part,
    read_set,
    ready_set,
)
from holdfast_workers.token_sets.refusals import LibraryMissing, SourceChanged

_TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)
_DOCUMENTS = st.lists(_TEXTS.filter(lambda text: END not in text), min_size=1, max_size=30)
_SOURCES = st.lists(st.tuples(st.sampled_from(["jsonl", "parquet", "txt"]), _DOCUMENTS), max_size=4)


def _write(folder: Path, number: int, kind: str, texts: list[str]) -> list[str]:
    """Write a file; return the documents in it."""
    path = folder / f"{number}.{kind}"
    if kind == "txt":
        path.write_bytes(texts[0].encode())
        return [texts[0].removeprefix("\ufeff")]
    if kind == "jsonl":
        path.write_bytes(as_lines(texts))
    else:
        pq.write_table(pa.table({"text": texts}), path, row_group_size=3)
    return texts


@settings(max_examples=60)
@given(
    sources=_SOURCES.filter(bool),
    by_bytes=st.booleans(),
    part_bytes=st.integers(1, 2000),
    shard_bytes=st.integers(1, 300),
)
def test_the_shards_are_exactly_the_documents_in_order(
    tokenizer_file: Path,
    sources: list[tuple[str, list[str]]],
    by_bytes: bool,
    part_bytes: int,
    shard_bytes: int,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = [
            text
            for number, (kind, texts) in enumerate(sources)
            for text in _write(folder, number, kind, texts)
        ]
        lost = expected.count("")  # a file with nothing but the mark of its byte order
        preparation = Preparation(
            folder / "scratch",
            SourceSpec(path=f"{folder}/*.*"),
            DataSpec(tokenizer="bytes" if by_bytes else str(tokenizer_file), bad_records=0.99),
            part_bytes=part_bytes,
        )
        with mock.patch.object(prepare, "SHARD_BYTES", shard_bytes):
            if lost == len(expected):
                return
            made = preparation.run()
        assert preparation.documents(made) == [text for text in expected if text]
        assert made.bad_count == lost
        size = made.tokenizer.token_bytes
        for shard in made.shards:
            assert shard.documents == 1 or shard.tokens * size + shard.documents * 8 <= shard_bytes
        assert sum(preparation.progress) == made.source_bytes


@dataclass
class _Interrupted(MemoryStorage):
    """Fails at one operation that changes it, before or after its effect."""

    left: list[int] = field(default_factory=lambda: [1 << 60])
    after: bool = False

    def below(self, folder: str) -> _Interrupted:
        return _Interrupted(self.bucket, f"{self.prefix}{folder}/", self.left, self.after)

    @contextmanager
    def write(self, name: str) -> Iterator[ObjectWriter]:  # type: ignore[override]
        with self._counted(), super().write(name) as stream:
            yield stream

    def put_new(self, name: str, content: bytes) -> None:
        with self._counted():
            super().put_new(name, content)

    def delete_all(self) -> None:
        with self._counted():
            super().delete_all()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.left[0] -= 1
        fails = self.left[0] == 0
        if fails and not self.after:
            raise TransientStorageError(self.uri, "it is away")
        yield
        if fails:
            raise TransientStorageError(self.uri, "it is away after all")


@pytest.fixture
def lines(tmp_path: Path) -> Preparation:
    (tmp_path / "a.jsonl").write_bytes(as_lines(f"document {n}" for n in range(100)))
    (tmp_path / "b.jsonl").write_bytes(as_lines(f"another {n}" for n in range(30)) + b"{\n")
    return Preparation(
        tmp_path / "scratch",
        SourceSpec(path=f"{tmp_path}/*.jsonl"),
        DataSpec(bad_records=0.1),
        part_bytes=1000,
    )


@pytest.mark.parametrize("after", [False, True])
def test_a_preparation_that_is_interrupted_anywhere_goes_on_to_the_same_set(
    lines: Preparation, after: bool
) -> None:
    undisturbed = lines.run()
    whole = lines.storage
    assert isinstance(whole, MemoryStorage)
    for operation in range(1, 1000):
        bucket = Bucket()
        lines.storage = _Interrupted(bucket, left=[operation], after=after)
        try:
            lines.run()
        except TransientStorageError:
            lines.storage = MemoryStorage(bucket)
            lines.progress.clear()
            assert lines.run() == undisturbed
            kept = {
                name: content for name, content in bucket.objects.items() if "/parts/" not in name
            }
            assert kept == whole.bucket.objects
        else:
            break
    shards = len(undisturbed.shards)
    assert operation == 2 * shards + 3  # each with a part's record; manifest, removal, the end


def test_of_a_preparation_whose_disk_is_full_nothing_half_written_is_used(
    small_file_system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "SHARD_BYTES", 400_000)
    (tmp_path / "a.jsonl").write_bytes(as_lines(f"{n} {'x' * 999}" for n in range(3000)))
    preparation = Preparation(
        tmp_path / "scratch",
        SourceSpec(path=f"{tmp_path}/a.jsonl"),
        storage=open_storage(str(small_file_system / "tokens"), StorageOptions()),
        part_bytes=700_000,
    )
    filler = small_file_system / "filler"
    filler.write_bytes(bytes(5 << 20))
    with pytest.raises(TransientStorageError, match="No space left"):
        preparation.run()
    plan, _tokenizer = preparation.plan()
    folder = preparation.storage.below(plan.key)
    done = finished_parts(plan, folder)
    assert 0 < len(done) < len(plan.parts)
    assert ready_set(folder) is None
    for shard in (shard for part in done.values() for shard in part.shards):
        assert shard_digest(folder.read(shard.object_name)) == shard.digest
    filler.unlink()
    preparation.progress.clear()
    made = preparation.run()
    assert sum(preparation.progress) == sum(
        part.nbytes for part in plan.parts if part.index not in done
    )
    assert preparation.documents(made) == [f"{n} {'x' * 999}" for n in range(3000)]
    assert {*folder.objects()} == {MANIFEST, *(shard.object_name for shard in made.shards)}


def test_parts_that_are_finished_are_not_made_again(lines: Preparation) -> None:
    plan, tokenizer = lines.plan()
    folder = lines.storage.below(plan.key)
    for part in plan.parts[:3]:
        make_part(plan, part, tokenizer, folder, lines.options, lines.scratch, lambda _: None)
    assert sorted(finished_parts(plan, folder)) == [0, 1, 2]
    lines.run()
    assert sum(lines.progress) == plan.source_bytes - sum(p.nbytes for p in plan.parts[:3])


@pytest.mark.parametrize("damage", ["record", "other_plan", "shard_gone", "shard_cut"])
def test_a_damaged_part_is_made_again(lines: Preparation, damage: str) -> None:
    plan, tokenizer = lines.plan()
    folder = lines.storage.below(plan.key)
    made = [
        make_part(plan, part, tokenizer, folder, lines.options, lines.scratch, lambda _: None)
        for part in plan.parts
    ]
    name = "parts/00000001.json"
    if damage == "record":
        write_small(folder, name, folder.read(name).replace(b'"records": ', b'"records": 1'))
    elif damage == "other_plan":
        write_small(folder, name, made[1].encode("0" * 32))
    elif damage == "shard_gone":
        folder.delete(made[1].shards[0].object_name)
    else:
        shard = made[1].shards[0].object_name
        write_small(folder, shard, folder.read(shard)[:-1])
    assert sorted(finished_parts(plan, folder)) == [0, *range(2, len(plan.parts))]
    assert lines.run() == finish(plan, dict(enumerate(made)), folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(path.read_bytes() + b"\n"),
        lambda path: path.write_bytes(path.read_bytes()),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
    ],
)
@pytest.mark.parametrize("during", [False, True])
def test_a_source_that_changes_meanwhile_is_refused(
    lines: Preparation, change: Callable[[Path], object], during: bool
) -> None:
    path = lines.scratch.parent / "b.jsonl"
    plan, tokenizer = lines.plan()
    folder = lines.storage.below(plan.key)
    part = plan.parts[-1]

    def changed(_nbytes: int) -> None:
        change(path)
        path.touch()  # another time, even on a coarse clock

    if not during:
        changed(0)
    with pytest.raises(SourceChanged, match=r"b\.jsonl.* when the preparation began"):
        make_part(plan, part, tokenizer, folder, lines.options, lines.scratch, changed)
    assert not finished_parts(plan, folder)


def test_a_change_while_a_file_is_read_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"{n} {'x' * n}" for n in range(3000)]
    pq.write_table(pa.table({"text": texts}), path, compression="none", use_dictionary=False)
    preparation = Preparation(tmp_path / "scratch", SourceSpec(path=str(path)))
    plan, tokenizer = preparation.plan()

    def cut(_nbytes: int) -> None:
        path.write_bytes(path.read_bytes()[:10])

    with pytest.raises(
        SourceChanged, match=r"a\.parquet is not the file that was listed"
    ) as raised:
        make_part(
            plan, plan.parts[0], tokenizer, preparation.storage, preparation.options, tmp_path, cut
        )
    assert "is damaged or cut off: it has" in str(raised.value.__context__)


def test_another_tokenizer_than_the_plans_is_refused(
    lines: Preparation, tokenizer_file: Path
) -> None:
    plan, _tokenizer = lines.plan()
    lines.data = DataSpec(tokenizer=str(tokenizer_file))
    _plan, other = lines.plan()
    with pytest.raises(SourceChanged, match="is not the one with which"):
        lines.carry_out(plan, other)


def test_parts_are_made_with_the_version_of_the_plan(
    lines: Preparation, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines.data = DataSpec(tokenizer=str(tokenizer_file), bad_records=0.1)
    plan, tokenizer = lines.plan()
    version = tokenizer.facts.library
    monkeypatch.setattr("tokenizers.__version__", "0.1.2")
    with pytest.raises(LibraryMissing, match=rf"has tokenizers 0\.1\.2, and .* with {version}: in"):
        lines.carry_out(plan, tokenizer)
    assert lines.plan()[0].key != plan.key


def test_the_key_names_all_that_the_tokens_depend_on(
    lines: Preparation, tokenizer_file: Path
) -> None:
    path = lines.scratch.parent / "a.jsonl"
    keys = [lines.plan()[0].key]
    lines.data = DataSpec(tokenizer=str(tokenizer_file), bad_records=0.1)
    keys.append(lines.plan()[0].key)
    lines.data = DataSpec(tokenizer=str(tokenizer_file), bad_records=0.1, document_end="a")
    keys.append(lines.plan()[0].key)
    lines.part_bytes += 1
    keys.append(lines.plan()[0].key)
    lines.source = SourceSpec(path=lines.source.path, text="body")
    keys.append(lines.plan()[0].key)
    path.write_bytes(path.read_bytes() + b"\n")
    keys.append(lines.plan()[0].key)
    assert len(set(keys)) == 6
    lines.source = SourceSpec(path=lines.source.path, text="body", weight=0.5)
    assert lines.plan()[0].key == keys[-1]


def test_two_preparations_at_once_make_one_set(lines: Preparation) -> None:
    plan, tokenizer = lines.plan()
    folder = lines.storage.below(plan.key)
    results = {
        part.index: make_part(
            plan, part, tokenizer, folder, lines.options, lines.scratch, lambda _: None
        )
        for part in plan.parts
    }
    first = finish(plan, results, folder)
    assert finish(plan, results, folder) == first == lines.run()
    assert not [name for name in folder.objects() if name.startswith("parts/")]


@pytest.mark.parametrize("damage", ["shard_gone", "shard_cut", "manifest"])
def test_a_set_that_is_damaged_or_has_lost_a_shard_is_made_again(
    lines: Preparation, damage: str
) -> None:
    made = lines.run()
    assert isinstance(lines.storage, MemoryStorage)
    whole = dict(lines.storage.bucket.objects)
    folder = lines.storage.below(lines.plan()[0].key)
    name = MANIFEST if damage == "manifest" else made.shards[1].object_name
    if damage == "shard_gone":
        folder.delete(name)
    else:
        write_small(folder, name, folder.read(name)[:-1])
    assert ready_set(folder) is None
    assert MANIFEST not in folder.objects()
    assert lines.run() == made == ready_set(folder)
    assert lines.storage.bucket.objects == whole


def test_a_set_is_read_only_if_it_is_the_one(lines: Preparation) -> None:
    made = lines.run()
    folder = lines.storage.below(lines.plan()[0].key)
    assert read_set(folder, made.digest) == made
    with pytest.raises(BadTokenSet, match="prepare the data again"):
        read_set(folder, "0" * 32)
    write_small(folder, MANIFEST, folder.read(MANIFEST).replace(b"a.jsonl", b"x.jsonl"))
    write_small(folder, MANIFEST, folder.read(MANIFEST).replace(b"*.jsonl", b"x.jsonl"))
    with pytest.raises(BadTokenSet, match="does not match its own digest"):
        read_set(folder, made.digest)
    with pytest.raises(ObjectMissing):
        read_set(lines.storage.below("nothing"), None)


def test_what_crosses_processes_is_pickled(lines: Preparation) -> None:
    plan, tokenizer = lines.plan()
    folder = lines.storage.below(plan.key)
    result = make_part(
        plan, plan.parts[0], tokenizer, folder, lines.options, lines.scratch, lambda _: None
    )
    for value in (plan, tokenizer, result):
        assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.seconds
def test_an_object_of_a_bucket_that_changes_is_refused(tmp_path: Path, s3_server: S3Server) -> None:
    bucket = s3_server.new_bucket()
    options = StorageOptions(endpoint=s3_server.endpoint, credentials=CREDENTIALS)
    storage: Storage = open_storage(f"s3://{bucket}", options)
    write_small(storage, "web/a.jsonl", as_lines(["one", "two"]))
    preparation = Preparation(
        tmp_path / "scratch", SourceSpec(path=f"s3://{bucket}/web/a.jsonl"), options=options
    )
    plan, tokenizer = preparation.plan()
    write_small(storage, "web/a.jsonl", as_lines(["one", "six"]))
    with pytest.raises(SourceChanged, match=r"a\.jsonl is not the file that was listed"):
        preparation.carry_out(plan, tokenizer)
    storage.delete("web/a.jsonl")
    with pytest.raises(SourceChanged, match="it was removed"):
        preparation.carry_out(plan, tokenizer)
