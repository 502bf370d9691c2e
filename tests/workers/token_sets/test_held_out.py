"""Documents for validation: a share of the sources, or files of their own."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.data.preparation import Preparation, as_lines

from holdfast_workers.checkpoint.storage import TransientStorageError
from holdfast_workers.data.token_set import TokenSet
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec.train import DataSpec, SourceSpec, ValidationSpec
from holdfast_workers.token_sets import source_files
from holdfast_workers.token_sets.refusals import DataRefused
from holdfast_workers.token_sets.source_files import SourceFile, list_source, refuse_shared_files

WORDS = st.text("abc", min_size=1, max_size=3)


def keeping(share: float) -> DataSpec:
    return DataSpec(validation=ValidationSpec(share=share))


def prepared(folder: Path, texts: list[str], share: float, part_bytes: int = 40) -> Preparation:
    folder.mkdir(parents=True)
    path = folder / "a.jsonl"
    path.write_bytes(as_lines(texts))
    source = SourceSpec(path=str(path))
    return Preparation(folder / "scratch", source, keeping(share), part_bytes=part_bytes)


def held_out(preparation: Preparation, made: TokenSet) -> list[str]:
    return preparation.documents(made, made.held_out)


@settings(max_examples=40)
@given(
    first=st.lists(WORDS, min_size=1, max_size=40),
    second=st.lists(WORDS, min_size=1, max_size=40),
    share=st.floats(0.05, 0.5),
    part_bytes=st.integers(1, 400),
)
def test_each_document_is_on_one_side_with_all_its_copies(
    first: list[str], second: list[str], share: float, part_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept, trained = [], []
        for name, texts in (("1", first), ("2", second)):
            preparation = prepared(Path(folder) / name, texts, share, part_bytes)
            try:
                made = preparation.run()
            except DataRefused as refused:
                assert "data.validation.share keeps all of its documents" in str(refused)
                return
            kept.append(held_out(preparation, made))
            trained.append(preparation.documents(made))
            assert sorted(kept[-1] + trained[-1]) == sorted(texts)
            assert [*trained[-1]] == [text for text in texts if text in set(trained[-1])]
        assert not {*kept[0], *kept[1]} & {*trained[0], *trained[1]}


def test_the_share_is_about_what_was_asked_for(tmp_path: Path) -> None:
    preparation = prepared(tmp_path / "a", [f"text {n}" for n in range(4000)], 0.25, 1 << 20)
    made = preparation.run()
    assert 900 < sum(shard.documents for shard in made.held_out) < 1100
    assert made.documents + sum(shard.documents for shard in made.held_out) == 4000


def test_a_preparation_that_lost_a_shard_of_validation_makes_it_again(tmp_path: Path) -> None:
    preparation = prepared(tmp_path / "a", [f"text {n}" for n in range(60)], 0.3)
    made = preparation.run()
    plan, _ = preparation.plan()
    preparation.storage.below(plan.key).delete(made.held_out[0].object_name)
    assert preparation.run() == made
    assert held_out(preparation, made)


def test_another_share_is_another_set(tmp_path: Path) -> None:
    texts = [f"text {n}" for n in range(60)]
    one, two = (prepared(tmp_path / str(n), texts, n / 10) for n in (2, 4))
    two.source = one.source
    assert one.plan()[0].key != two.plan()[0].key
    assert one.run().digest != two.run().digest
    assert one.data.origin_of(one.source) != two.data.origin_of(one.source)
    one.data = DataSpec()
    whole = one.run()
    assert not whole.held_out
    assert whole.digest not in {one.run().digest, two.run().digest} - {whole.digest}


def test_a_share_that_takes_every_document_is_refused(tmp_path: Path) -> None:
    texts = [f"{n}" for n in range(50)]
    single = prepared(tmp_path / "all", texts, 0.5, 1 << 20)
    kept = held_out(single, single.run())
    refused = prepared(tmp_path / "kept", kept[:1], 0.5)
    with pytest.raises(DataRefused, match="lower it, or name the files of validation by"):
        refused.run()


@pytest.mark.parametrize(
    "validation", ["web/held-out.parquet", "symbolic.parquet", "hard.parquet", "web"]
)
def test_files_of_validation_that_a_source_has_too_are_refused(
    tmp_path: Path, validation: str
) -> None:
    web = tmp_path / "web"
    web.mkdir()
    for name in ("a", "held-out"):
        pq.write_table(pa.table({"text": [name]}), web / f"{name}.parquet")
    (tmp_path / "symbolic.parquet").symlink_to(web / "held-out.parquet")
    (tmp_path / "hard.parquet").hardlink_to(web / "held-out.parquet")
    options = StorageOptions()
    own = SourceSpec(path=str(tmp_path / validation))
    files = list_source(own, options)
    other = SourceSpec(path=str(web / "*.parquet"))
    with pytest.raises(DataRefused, match=r"is in the source .*parquet too, and would be trained"):
        refuse_shared_files(files, own, [(other, options)])
    apart = SourceSpec(path=str(web / "a.parquet"))
    if validation != "web":
        refuse_shared_files(files, own, [(apart, options)])


def test_a_fault_of_the_other_source_is_said_to_be_of_that_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_lines(["a"]))
    own = SourceSpec(path=str(tmp_path / "a.jsonl"))
    other = SourceSpec(path=f"{tmp_path}/nowhere/*.parquet")
    options = StorageOptions()
    files = list_source(own, options)
    compared = f"^while it is compared with the source {re.escape(other.path)}: "
    with pytest.raises(DataRefused, match=f"{compared}it matches no file"):
        refuse_shared_files(files, own, [(other, options)])

    def away(source: SourceSpec, options: StorageOptions) -> tuple[SourceFile, ...]:
        raise TransientStorageError("/mnt/lab", "Stale file handle")

    monkeypatch.setattr(source_files, "list_source", away)
    with pytest.raises(TransientStorageError, match=f"{compared}/mnt/lab: Stale file handle"):
        refuse_shared_files(files, own, [(other, options)])


def test_an_object_is_found_at_another_endpoint_with_the_credentials_of_the_other_source(
    s3_server: S3Server,
) -> None:
    bucket = s3_server.new_bucket()
    s3_server.client.put_object(Bucket=bucket, Key="web/a.jsonl", Body=as_lines(["a"]))
    path, elsewhere = f"s3://{bucket}/web/a.jsonl", "http://s3.example.com"
    own = SourceSpec(path=path, endpoint=elsewhere, secret="theirs")
    other = SourceSpec(path=f"s3://{bucket}/web", endpoint=s3_server.endpoint, secret="ours")
    options = StorageOptions(endpoint=s3_server.endpoint, credentials=CREDENTIALS)
    files = (SourceFile(path, 1, "1"),)
    with pytest.raises(DataRefused) as refused:
        refuse_shared_files(files, own, [(other, options)])
    assert str(refused.value) == (
        f"{path} is in the source {other.path} too ({elsewhere} and {s3_server.endpoint} may be "
        "one), and would be trained on: move it elsewhere, or name the files of that source by a "
        "glob without it"
    )
    apart = (SourceFile(f"s3://{bucket}/held-out.jsonl", 1, "1"),)
    refuse_shared_files(apart, own, [(other, options)])
