"""A model of the library transformers as a job: prepared, trained through faults, evaluated,
verified, exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.end_to_end.conftest import ONE_NODE, Product, spec
from tests.support.data.preparation import train_tokenizer
from tests.support.ranks.library_models import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(500)]
STEPS = 40
TEXTS = ["the quick brown fox", "jumps over", "the lazy dog", "and sleeps"]


def job(folder: Path, corpus: Path, name: str, **model: Any) -> dict[str, Any]:
    return spec(
        name=name,
        model={"family": "transformers", "from": str(folder), "sequence_length": 32, **model},
        data={"sources": [{"path": str(corpus)}], "validation": {"share": 0.1}},
        train={**spec()["train"], "steps": STEPS, "optimizer": {"name": "muon", "lr": 1e-3}},
        evaluate={"every_steps": 10},
        **ONE_NODE,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("library") / "gpt2-tiny"
    save_model(made, "gpt2")
    train_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    lines = (json.dumps({"text": f"{TEXTS[at % 4]} {at}. " * 12}) for at in range(400))
    file.write_text("\n".join(lines))
    return file


def test_a_model_of_the_library_is_trained_as_it_is(
    product: Product, folder: Path, corpus: Path, tmp_path: Path
) -> None:
    client = product.client
    first = client.submit(job(folder, corpus, "library"))
    (folder.parent / "coded").mkdir()
    for file in folder.iterdir():
        (folder.parent / "coded" / file.name).write_bytes(file.read_bytes())
    coded = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModel": "x.py"}}
    (folder.parent / "coded" / "config.json").write_text(json.dumps(coded))
    refused = product.finish(client.submit(job(folder.parent / "coded", corpus, "coded")).id)
    assert refused.outcome is not None and refused.outcome.code == "model_refused"
    assert "it names code of its own, which is never run" in refused.outcome.message
    assert client.attempts(refused.id) == []
    product.wait_step(first.id, 3)
    product.kill_rank(first.id, 1)
    ended = product.finish(first.id)
    assert ended.state == "SUCCEEDED", ended.outcome
    assert len(client.incidents(first.id)) == 1
    published = ended.spec["model"]["published"]
    assert published["config"]["model_type"] == "gpt2"
    points = [point.values["eval_loss"] for point in client.metrics(first.id, ["eval_loss"])]
    losses = [float(loss) for loss in points if loss is not None]
    assert len(losses) == 4 and losses[-1] < losses[0]
    command = (sys.executable, "-m", "holdfast", "verify", first.id, "--timeout", "2m")
    environment = {**os.environ, "HOLDFAST_DATA_DIR": str(product.data_dir)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"{STEPS} of {STEPS} steps equal" in done.stdout, done.stdout
    again = product.finish(client.submit(ended.spec).id)
    assert again.state == "SUCCEEDED", again.outcome
    assert client.digests(again.id) == client.digests(first.id)
    exported = tmp_path / "exported"
    client.export_checkpoint(first.id, STEPS, exported, hugging_face=True)
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokens = AutoTokenizer.from_pretrained(exported)(TEXTS[0] * 4, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(folder).eval()(tokens, labels=tokens).loss
        after = model.eval()(tokens, labels=tokens).loss
    assert after < before
