"""Jobs that begin with the weights of a published model, and folders that are refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.end_to_end.conftest import ONE_NODE, Product, spec
from tests.end_to_end.test_data_sources import name_of
from tests.support.data.preparation import train_tokenizer
from tests.support.data.published_folder import CONFIG
from tests.support.waiting import DEADLINE_S
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from holdfast_service.cluster.weights_tasks import weight_set
from holdfast_workers.published.folder import model_of, published_shapes, read_folder
from holdfast_workers.published.model_config import read_config
from holdfast_workers.published.weight_files import INDEX, SINGLE
from holdfast_workers.published.weight_set import MANIFEST, OTHERS, digest_file

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(500)]
LENGTH = 32
STEPS = 100
OPTIMIZED = {
    "optimizer": {"name": "muon", "lr": 1e-3},
    "schedule": {"name": "wsd", "warmup_steps": 5},
    "ema": 0.9,
}
SIGN = "#"
"""One token of the tokenizer, however often it is repeated."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as transformers saves it, in several files, with its tokenizer."""
    made = tmp_path_factory.mktemp("published") / "qwen2-tiny"
    own = {name: value for name, value in CONFIG.items() if name != "model_type"}
    torch.manual_seed(7)
    model = Qwen2ForCausalLM(Qwen2Config(**own, initializer_range=0.3))
    model.save_pretrained(made, max_shard_size="60KB")
    train_tokenizer(made)
    assert len(list(made.glob("*.safetensors"))) > 1
    return made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text whose samples are all the same, so that the loss of the first step is known."""
    file = tmp_path_factory.mktemp("corpus") / "signs.jsonl"
    file.write_text(json.dumps({"text": SIGN * 40_000}))
    return file


def job(folder: Path, corpus: Path, name: str) -> dict[str, Any]:
    return spec(
        name=name,
        model={"from": str(folder), "sequence_length": LENGTH},
        data={"sources": [{"path": str(corpus)}]},
        train={**spec()["train"], **OPTIMIZED, "steps": STEPS},
        **ONE_NODE,
    )


def token_of(folder: Path) -> int:
    return int(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"][SIGN])


def first_loss(folder: Path) -> float:
    """As transformers computes it."""
    tokens = torch.full((1, LENGTH + 1), token_of(folder))
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]))


def cut(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / INDEX).unlink()
    for file in folder.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))


BAD: dict[Callable[[Path], None], str] = {cut: "cut off", pickled: "a pickle"}
"""Of those in `tests/service/cluster/test_weights_work.py`."""


@pytest.mark.story("published model")
def test_a_job_begins_with_published_weights_and_a_bad_folder_is_refused_in_a_sentence(
    product: Product, folder: Path, corpus: Path, tmp_path: Path
) -> None:
    client = product.client
    first = client.submit(job(folder, corpus, "tuned"))
    refused = {}
    for damage, said in BAD.items():
        bad = tmp_path / damage.__name__
        shutil.copytree(folder, bad)
        damage(bad)
        document = job(bad, corpus, "bad")
        document["data"]["tokenizer"] = str(folder)  # so that all share their tokens
        refused[client.submit(document).id] = bad, said
    for job_id, (bad, said) in refused.items():
        ended = product.finish(job_id)
        assert ended.outcome is not None and ended.outcome.code == "model_refused", ended.outcome
        assert said in ended.outcome.message and str(bad) in ended.outcome.message
        assert client.attempts(job_id) == []
    product.wait_step(first.id, 3)
    product.kill_rank(first.id, 1)
    ended = product.finish(first.id)
    assert ended.state == "SUCCEEDED", ended.outcome
    assert len(client.incidents(first.id)) == 1
    model = ended.spec["model"]
    assert (model["from"], model["dim"], model["qkv_bias"]) == (str(folder), 32, True)
    assert ended.spec["data"]["tokenizer"] == str(folder)
    point = next(iter(client.metrics(first.id, ["loss"])))
    assert point.step == 1
    assert point.values["loss"] == pytest.approx(first_loss(folder), rel=1e-4)
    kept = product.data_dir / "weights" / model["published"]["digest"]
    assert (kept / MANIFEST).stat().st_size == model["published"]["manifest_bytes"]
    copied = kept / OTHERS / "tokenizer.json"
    assert copied.read_bytes() == (folder / "tokenizer.json").read_bytes()
    (event,) = [e for e in client.events(first.id, limit=1000).items if e.kind == "model.prepared"]
    assert (event.data["family"], event.data["digest"]) == ("qwen2", model["published"]["digest"])
    again = product.finish(client.submit(ended.spec).id)
    assert again.state == "SUCCEEDED", again.outcome
    assert client.digests(again.id) == client.digests(first.id)
    exported = tmp_path / "exported"
    client.export_checkpoint(first.id, STEPS, exported, hugging_face=True)
    assert AutoTokenizer.from_pretrained(exported)(SIGN)["input_ids"] == [token_of(folder)]
    averaged = tmp_path / "averaged"
    client.export_checkpoint(first.id, STEPS, averaged, hugging_face=True, average=True)
    losses = [first_loss(each) for each in (folder, averaged, exported)]
    assert max(losses[1:]) < 0.5 * losses[0]
    assert losses[1] != losses[2]


@pytest.mark.cell("P6", "digest task")
def test_a_killed_digest_task_is_repeated_and_changes_no_digest(
    product: Product, corpus: Path, tmp_path: Path
) -> None:
    """The job does not fit into its memory, so that it ends once its weights are read."""
    folder = tmp_path / "large"
    folder.mkdir()
    config = {**CONFIG, "vocab_size": 4_000_000}
    (folder / "config.json").write_text(json.dumps(config))
    write_zeros(folder / SINGLE, published_shapes(model_of(read_config(config))))
    train_tokenizer(folder)
    document = job(folder, corpus, "large")
    document["resources"] = {**document["resources"], "memory_per_worker_bytes": 1_000_000}
    submitted = product.client.submit(document)
    kill_reader(folder / SINGLE)
    outcome = product.finish(submitted.id).outcome
    assert outcome is not None and outcome.code == "model_unfit", outcome
    found = read_folder(folder)
    names = [name for name, _ in found.files], found.others
    files, others = (
        [digest_file(folder / name, lambda nbytes: None) for name in group] for group in names
    )
    expected = weight_set(found, files, others)
    kept = product.data_dir / "weights" / expected.digest / MANIFEST
    assert kept.read_bytes() == expected.encode()


def kill_reader(file: Path) -> None:
    """End a digest task while it reads the file."""

    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        named = [pid for pid in psutil.pids() if name_of(pid).startswith("ray::_digest_we")]
        for pid in named:
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(pid, signal.SIGSTOP)
                reads = any(path.resolve() == file for path in Path(f"/proc/{pid}/fd").iterdir())
                os.kill(pid, signal.SIGKILL if reads else signal.SIGCONT)
                if reads:
                    return
    raise AssertionError(f"no task reads {file}")


def write_zeros(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A file of tensors of zeros, which takes no room on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
