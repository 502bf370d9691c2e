"""Jobs that train on tokens of Parquet and JSON lines, through deaths of all who touch them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tests.end_to_end.conftest import ONE_NODE, Product, spec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from holdfast_service.embedded_cluster import processes

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(300)]
STEPS = 120
END = "<|end|>"
WORDS = [f"{a}{b}{c}" for a in "bdgklmnprst" for b in "aeiou" for c in ("", "n", "r", "st")]


def texts(count: int, seed: int) -> list[str]:
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(5, 120))) for _ in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`docs/*.parquet`, `lines.jsonl.zst` with one line that is no JSON in 1,001, and a
    tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "docs").mkdir()
    for number in range(3):
        table = pyarrow.table({"content": texts(200, number), "id": list(range(200))})
        pyarrow.parquet.write_table(table, folder / "docs" / f"{number}.parquet")
    lines = [json.dumps({"text": text}) for text in texts(1000, 9)]
    lines.insert(700, "{no JSON")
    with pyarrow.CompressedOutputStream(folder / "lines.jsonl.zst", "zstd") as out:
        out.write("\n".join(lines).encode())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(300, 0), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def job(corpus: Path, name: str, **changes: Any) -> dict[str, Any]:
    data = {
        "tokenizer": str(corpus / "tokenizer.json"),
        "document_end": END,
        "shuffle_gb": 0.00001,
        "sources": [
            {"path": f"{corpus}/docs/*.parquet", "text": "content", "weight": 0.7},
            {"path": f"{corpus}/lines.jsonl.zst", "weight": 0.3},
        ],
    }
    train = {**spec()["train"], "steps": STEPS}
    return spec(name=name, data=data, train=train, **ONE_NODE, **changes)


def kill_named(product: Product, name: str) -> None:
    """SIGKILL to the processes of this name, once there are any."""

    def kill_them() -> bool:
        killed = False
        for pid in processes.of_cluster(product.cluster.cluster_id):
            with contextlib.suppress(OSError):  # it has just ended
                if Path(f"/proc/{pid}/comm").read_text().startswith(name):
                    os.kill(pid, signal.SIGKILL)
                    killed = True
        return killed

    product.wait(kill_them)


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
    kill_named(product, "ray::TokenPrepa")
    product.wait_step(second.id, 5, 240)
    product.kill_rank(second.id, 1)
    kill_named(product, "hf-fetcher")
    product.wait(lambda: any(found.closed_at for found in client.incidents(second.id)))
    for submitted in (first, second):
        ended = product.finish(submitted.id)
        assert ended.state == "SUCCEEDED", ended.outcome
    outcome = product.finish(refused.id).outcome
    assert outcome is not None and outcome.code == "data_refused"
    assert "docs/0.parquet" in outcome.message and "'contents'" in outcome.message
    assert client.digests(first.id) == client.digests(second.id)
    assert product.samples(first.id) == product.samples(second.id)
    assert set(client.digests(first.id)) >= set(range(1, STEPS + 1))
    prepared = [client.get(each.id).spec["data"]["prepared"] for each in (first, second)]
    assert prepared[0] == prepared[1]
    assert all(each["vocabulary"] <= 400 and each["tokens"] > 1000 for each in prepared[0])
    (event,) = [e for e in client.events(first.id, limit=1000).items if e.kind == "data.prepared"]
    assert event.data["bad_count"] == 1
    assert "lines.jsonl.zst, row 701: " in event.data["bad"][0]
