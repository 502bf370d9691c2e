"""Jobs that train on tokens of Parquet and JSON lines, through deaths of all who touch them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pytest
import yaml
from tests.end_to_end.conftest import ONE_NODE, REPOSITORY, Product, spec
from tests.support.data.preparation import Preparation
from tests.support.waiting import DEADLINE_S

from holdfast_service.embedded_cluster import processes
from holdfast_service.views.token_sets import DataPreparationView
from holdfast_workers.data.token_set import MANIFEST, TokenSet, shard_digest
from holdfast_workers.spec.train import DataSpec, SourceSpec
from holdfast_workers.token_sets.plan import MOST_PIECES

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(500)]
STEPS = 120
EPOCHS = 1 / 16
EXAMPLE = REPOSITORY / "examples" / "tokens-lm.yaml"
MODULES = 40


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of the example, with a line that is no JSON in another file of its code."""
    folder = tmp_path_factory.mktemp("corpus")
    maker = REPOSITORY / "examples" / "data" / "make_corpus.py"
    subprocess.run([sys.executable, str(maker), str(folder), str(MODULES)], check=True)
    (folder / "code" / "z.jsonl.zst").write_bytes(
        pyarrow.compress(b'{"text": "x"}\n{no JSON', codec="zstd", asbytes=True)
    )
    return folder


def job(corpus: Path, name: str) -> dict[str, Any]:
    """The example, smaller."""
    document = yaml.safe_load(EXAMPLE.read_text().replace("/tmp/holdfast-data", str(corpus)))
    smaller = {"bad_records": 0.1, "shuffle_gb": 0.00001, "validation": {"share": 0.1}}
    data = {**document["data"], **smaller}
    train = {**spec()["train"], "steps": STEPS}
    return spec(name=name, data=data, train=train, **ONE_NODE)


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


def signal_named(product: Product, name: str, number: int, most: int = 1000) -> list[int]:
    """The processes of this name, at most so many, which got the signal as soon as there were
    any: they may be short-lived."""
    found: list[int] = []
    until = time.monotonic() + DEADLINE_S
    while not found:
        assert time.monotonic() < until, f"no process {name}"
        named = {pid for pid in psutil.pids() if name_of(pid).startswith(name)}
        own = processes.of_cluster(product.cluster.cluster_id) if named else []
        for pid in named.intersection(own):
            with contextlib.suppress(ProcessLookupError):
                if len(found) < most:
                    os.kill(pid, number)
                    found.append(pid)
    return found


@pytest.mark.story("tokens of sources")
@pytest.mark.cell("P6", "token fetcher")
def test_two_jobs_share_their_tokens_faults_change_no_bit_and_a_wrong_column_is_named(
    product: Product, corpus: Path
) -> None:
    client = product.client
    wrong = job(corpus, "wrong-column")
    wrong["data"]["sources"][0]["text"] = "contents"
    refused = client.submit(wrong)
    first = client.submit(job(corpus, "tokens"))
    second = client.submit(job(corpus, "tokens-too"))
    signal_named(product, "ray::TokenPrepa", signal.SIGKILL)
    product.wait_step(second.id, 5, 240)
    product.kill_rank(second.id, 1)
    signal_named(product, "hf-fetcher", signal.SIGKILL)
    product.wait(lambda: any(found.closed_at for found in client.incidents(second.id)))
    for submitted in (first, second):
        ended = product.finish(submitted.id, 240)
        assert ended.state == "SUCCEEDED", ended.outcome
    outcome = product.finish(refused.id).outcome
    assert outcome is not None and outcome.code == "data_refused"
    assert "docs/part-000.parquet" in outcome.message and "'contents'" in outcome.message
    assert client.digests(first.id) == client.digests(second.id)
    assert product.samples(first.id) == product.samples(second.id)
    assert set(client.digests(first.id)) >= set(range(1, STEPS + 1))
    prepared = [client.get(each.id).spec["data"]["prepared"] for each in (first, second)]
    assert prepared[0] == prepared[1]
    assert all(each["vocabulary"] <= 4096 and each["tokens"] > 1000 for each in prepared[0])
    (event,) = [e for e in client.events(first.id, limit=1000).items if e.kind == "data.prepared"]
    assert event.data["bad_count"] == 1
    held_out = sum(each["held_out"] for each in prepared[0])
    assert event.data["validation_tokens"] == held_out > 100
    whole = client.get(first.id)
    assert whole.reads is not None and "document_end <|endoftext|> " in whole.reads.tokenizer
    by_epochs = job(corpus, "by-epochs")
    for source in by_epochs["data"]["sources"]:
        del source["weight"]
    del by_epochs["train"]["steps"]
    by_epochs["train"]["epochs"] = EPOCHS
    ended = product.finish(client.submit(by_epochs).id, 240)
    assert ended.state == "SUCCEEDED", ended.outcome
    samples = EPOCHS * sum(each["samples"] for each in ended.spec["data"]["prepared"])
    assert ended.progress.step == ended.progress.steps
    assert ended.progress.steps == ceil(samples / ended.spec["train"]["global_batch"])
    assert "z.jsonl.zst, row 2: " in event.data["bad"][0]


@pytest.mark.cell("P6", "prepare task")
def test_a_killed_prepare_task_costs_its_own_part_and_changes_no_token(
    product: Product, corpus: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3 * MOST_PIECES):  # three parts
        (texts / f"{number:04d}.txt").write_text(f"the document {number} of a corpus\n" * 20)
    path = f"{texts}/*.txt"
    data = {
        "tokenizer": str(corpus / "tokenizer.json"),
        "document_end": "<|endoftext|>",
        "sources": [{"path": path}],
    }
    undisturbed = Preparation(tmp_path, SourceSpec(path=path), DataSpec.model_validate(data))
    folder = product.data_dir / "tokens" / undisturbed.plan()[0].key

    def prepared() -> DataPreparationView:
        return product.client.prepare_data(spec(data=data))

    def shards() -> dict[str, tuple[int, int]]:
        """Name → what shows that the file was not written again."""
        stats = {path.name: path.stat() for path in folder.iterdir() if path.is_file()}
        return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}

    prepared()
    (stopped,) = signal_named(product, "ray::_make_part", signal.SIGSTOP, most=1)
    product.wait(lambda: not prepared().done and len(list(folder.glob("parts/*"))) == 2)
    before = shards()
    assert len(before) == 2
    os.kill(stopped, signal.SIGKILL)
    product.wait(lambda: "ended 1 time (WorkerCrashedError)" in prepared().text)
    product.wait(lambda: prepared().done)
    assert prepared().ready, prepared().text
    expected = undisturbed.run()
    made = TokenSet.decode((folder / MANIFEST).read_bytes(), MANIFEST)
    assert made.digest == expected.digest
    assert len(made.shards) == 3
    for shard in made.shards:
        assert shard_digest((folder / shard.object_name).read_bytes()) == shard.digest
    assert shards().items() > before.items()
