"""A rank gets exactly its box of a published tensor, or an error: whatever the file has become."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.checkpoint.published_models import (
    TINY,
    prepared_model,
    weight_set_of,
    write_folder,
    write_safetensors,
)
from torch import Tensor

from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.published import weight_set
from holdfast_workers.published.weight_files import SINGLE, UnfitWeights, find_tensors
from holdfast_workers.published.weight_reader import WeightReader, WeightsUnavailable
from holdfast_workers.published.weight_set import (
    BadWeightSet,
    WeightSet,
    digest_file,
)
from holdfast_workers.state.rank_state import ShardBox

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """Some tensors in a file, and a box of one of them."""

    tensors: dict[str, Tensor]
    name: str
    box: Box
    chunk_bytes: int
    pad: int
    """Spaces behind the header: tensors may begin at any byte."""

    @property
    def expected(self) -> Tensor:
        slices = (
            slice(start, start + n)
            for start, n in zip(self.box.offsets, self.box.shape, strict=True)
        )
        return self.tensors[self.name][tuple(slices)]

    @contextmanager
    def written(self) -> Iterator[tuple[Path, WeightReader]]:
        with TemporaryDirectory(prefix="holdfast-weights-") as folder:
            path = Path(folder) / SINGLE
            write_safetensors(path, self.tensors, self.pad)
            found = find_tensors(path.parent)
            file = digest_file(path, lambda _: None, self.chunk_bytes)
            weights = WeightSet({}, (file,), tuple(found.values()), (), self.chunk_bytes)
            again = WeightSet.decode(weights.encode(), weights.digest, "manifest.json")
            assert again == weights
            yield path, WeightReader(path.parent, again)

    def rows(self, path: Path) -> tuple[int, int]:
        """The bytes of the file from the first to the last row of the box."""
        tensor = find_tensors(path.parent)[self.name]
        if not self.box.volume:
            return tensor.begin, tensor.begin
        if not self.box.shape:
            return tensor.begin, tensor.begin + tensor.nbytes
        row = tensor.nbytes // tensor.shape[0]
        first = tensor.begin + self.box.offsets[0] * row
        return first, first + self.box.shape[0] * row


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tensors = {}
    for index in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        values = torch.arange(1, 1 + torch.Size(shape).numel()) * (index + 1)
        tensors[f"t{index}"] = values.view(shape).to(draw(st.sampled_from(DTYPES)))
    name = draw(st.sampled_from(sorted(tensors)))
    offsets = tuple(draw(st.integers(0, side)) for side in tensors[name].shape)
    sides = zip(tensors[name].shape, offsets, strict=True)
    lengths = tuple(draw(st.integers(0, side - start)) for side, start in sides)
    chunk_bytes = draw(st.sampled_from([1, 3, 4, 7, 16, 64, 1 << 20]))
    return Case(tensors, name, Box(offsets, lengths), chunk_bytes, draw(st.integers(0, 9)))


def filled(reader: WeightReader, case: Case, dtype: torch.dtype = torch.float32) -> Tensor:
    target = torch.full(case.box.shape, -1.0, dtype=dtype)
    reader.fill(target, case.name, case.box)
    return target


@given(case=cases(), dtype=st.sampled_from(DTYPES))
def test_every_box_of_every_tensor_has_the_values_of_a_slice(
    case: Case, dtype: torch.dtype
) -> None:
    with case.written() as (_, reader):
        assert torch.equal(filled(reader, case, dtype), case.expected.to(dtype))
        if len(case.box.shape) == 2:  # a target whose rows do not follow each other in memory
            across = torch.zeros(case.box.shape[::-1]).T
            reader.fill(across, case.name, case.box)
            assert torch.equal(across, case.expected.float())


@given(case=cases(), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_by_each_rank_that_reads_it_and_changes_no_value(
    case: Case, at: float, bit: int
) -> None:
    with case.written() as (path, reader):
        content = bytearray(path.read_bytes())
        place = int(at * len(content))
        content[place] ^= 1 << bit
        first, end = case.rows(path)
        path.write_bytes(content)
        try:
            values = filled(reader, case)
        except BadWeightSet as error:
            begin = place // case.chunk_bytes * case.chunk_bytes
            upto = min(begin + case.chunk_bytes, len(content))
            assert f"its bytes {begin} to {upto} are others" in str(error)
        else:
            assert not first <= place < end
            assert torch.equal(values, case.expected.float())


@given(case=cases())
def test_a_rank_reads_no_chunk_but_those_with_its_rows(case: Case) -> None:
    with case.written() as (path, reader):
        content = path.read_bytes()
        first, end = case.rows(path)
        start = first // case.chunk_bytes * case.chunk_bytes
        stop = -(-end // case.chunk_bytes) * case.chunk_bytes if end > first else start
        kept = content[start:stop]
        path.write_bytes(b"\0" * start + kept + b"\0" * (len(content) - start - len(kept)))
        assert torch.equal(filled(reader, case), case.expected.float())


# --- a folder that is not what it was -------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "model", parts=2)
    return tmp_path / "model"


NAME = "model.embed_tokens.weight"
WHOLE = Box((0, 0), (300, 32))


def reader_of(folder: Path) -> tuple[WeightReader, Path]:
    """A reader, and the file of `NAME`."""
    weights = weight_set_of(folder, 4096)
    (file,) = (tensor.file for tensor in weights.tensors if tensor.name == NAME)
    return WeightReader(folder, weights), folder / file


def error_of(reader: WeightReader) -> str:
    with pytest.raises((BadWeightSet, WeightsUnavailable)) as caught:
        reader.fill(torch.empty(WHOLE.shape), NAME, WHOLE)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_file_that_changed_is_named_with_what_to_do(folder: Path) -> None:
    reader, path = reader_of(folder)
    content = path.read_bytes()
    again = "restore it, or submit the job again"
    changed = f"BadWeightSet: {path} has changed since the job was submitted, or is damaged"
    path.write_bytes(content[:-1])
    sizes = f"it has {len(content) - 1} bytes, and had {len(content)}"
    assert error_of(reader) == f"{changed}: {sizes}: {again}"
    damaged = bytearray(content)
    damaged[9000] ^= 1
    path.write_bytes(damaged)
    assert error_of(reader) == f"{changed}: its bytes 8192 to 12288 are others: {again}"


def test_a_file_that_shrinks_while_it_is_read_is_no_crash(folder: Path) -> None:
    weights, (_, path) = weight_set_of(folder, 4096), reader_of(folder)
    reader = WeightReader(folder, weights, on_read=lambda: os.truncate(path, 100))
    assert "it ends at byte 100 of" in error_of(reader)


def test_a_folder_that_is_away_may_come_back(folder: Path) -> None:
    reader, path = reader_of(folder)
    folder.rename(folder.with_name("away"))
    assert error_of(reader) == (
        f"PathUnavailable: {path}: No such file or directory, on the node {socket.gethostname()}: "
        f"each node must be able to read {folder}"
    )
    folder.with_name("away").rename(folder)
    reader.fill(torch.empty(WHOLE.shape), NAME, WHOLE)


def test_an_error_of_reading_may_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, _ = reader_of(folder)

    def fail(*_: object) -> int:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "preadv", fail)
    assert error_of(reader).startswith("WeightsUnavailable: ")


def test_parameters_have_their_published_names_and_shapes(folder: Path) -> None:
    reader, _ = reader_of(folder)
    box = ShardBox((300, 32), (298, 0), (2, 32), primary=True)
    target = torch.empty(2, 32)
    reader.fill_parameter(target, "head.weight", box)
    assert torch.equal(target, write_folder(folder, parts=2)["lm_head.weight"][298:])
    with pytest.raises(BadWeightSet, match=r"lm_head\.weight has the shape \(300, 32\)"):
        other = ShardBox((301, 32), (298, 0), (2, 32), primary=True)
        reader.fill_parameter(target, "head.weight", other)
    tied = folder.with_name("tied")
    write_folder(tied, {**TINY, "tie_word_embeddings": True})
    with pytest.raises(BadWeightSet, match=r"lm_head\.weight is not there"):
        reader_of(tied)[0].fill_parameter(target, "head.weight", box)


# --- the manifest ---------------------------------------------------------------------------------


def test_the_digest_of_a_set_is_of_its_bytes_and_not_of_its_place(tmp_path: Path) -> None:
    models = []
    for name in ("a", "b"):
        write_folder(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text("{}")
        models.append(prepared_model(tmp_path / name, tmp_path / f"store-{name}"))
    assert models[0].published.digest == models[1].published.digest  # type: ignore[union-attr]
    (tmp_path / "b" / "tokenizer.json").write_text("[]")
    other = prepared_model(tmp_path / "b", tmp_path / "store-b")
    assert other.published.digest != models[0].published.digest  # type: ignore[union-attr]


def test_a_manifest_with_another_digest_is_refused(folder: Path) -> None:
    weights = weight_set_of(folder)
    content = bytearray(weights.encode())
    content[50] ^= 1
    with pytest.raises(BadWeightSet, match=r"^/store/manifest\.json is damaged: its digest is"):
        WeightSet.decode(bytes(content), weights.digest, "/store/manifest.json")


def test_a_manifest_of_another_version_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_set, "VERSION", 2)
    later = weight_set_of(folder)
    content, digest = later.encode(), later.digest
    monkeypatch.undo()
    with pytest.raises(BadWeightSet, match="another version of Holdfast"):
        WeightSet.decode(content, digest, "manifest.json")


def test_a_file_that_changes_while_it_is_digested_is_refused(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    reads: list[int] = []
    whole = digest_file(path, reads.append, 4096)
    assert sum(reads) == whole.nbytes == path.stat().st_size
    content = path.read_bytes()

    def append(_: int) -> None:
        with path.open("ab") as file:
            file.write(b"x")

    def replace(_: int) -> None:
        path.with_suffix(".new").write_bytes(content)
        path.with_suffix(".new").rename(path)

    for change in (append, replace, lambda _: os.truncate(path, 100)):
        path.write_bytes(content)
        with pytest.raises(UnfitWeights, match="changes while it is read"):
            digest_file(path, change, 4096)
