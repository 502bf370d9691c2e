"""The folder of a published model is read by tasks: what they make of it, and of a bad one. The
tasks run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.support.data.published_folder import CONFIG, write_folder
from tests.support.service.ended_task import EndedTask
from tests.support.waiting import eventually

from holdfast_service.cluster import preparation_work, weights_tasks, weights_work
from holdfast_service.cluster.preparation_tasks import TaskEnd, TaskSlots
from holdfast_service.cluster.preparation_work import MOST_DEATHS
from holdfast_service.cluster.token_preparer import TokenPreparer
from holdfast_service.cluster.weights_work import WeightsWork
from holdfast_service.job_model.preparation import WeightsProgress, WeightsRequest, with_weights
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.published.model_config import read_config
from holdfast_workers.published.weight_files import INDEX, SINGLE
from holdfast_workers.published.weight_set import MANIFEST, OTHERS, WeightSet
from holdfast_workers.spec import ModelSpec, RemoteTierSpec


@dataclass
class Tasks:
    """Each ends at once; the first ones as `ends` says."""

    ends: list[TaskEnd] = field(default_factory=list)
    did: list[str] = field(default_factory=list)
    before: Callable[[str], None] = lambda what: None
    """Called before each task, with what it does."""

    def folder(self, node: str, request: WeightsRequest) -> EndedTask:
        return self._task("folder", lambda: weights_tasks._read_published(request))

    def digest(self, node: str, folder: str, name: str) -> EndedTask:
        return self._task(name, lambda: weights_tasks._digest_weights(folder, name))

    def publication(
        self,
        node: str,
        request: WeightsRequest,
        weights: WeightSet,
        uri: str,
        store: StorageOptions,
    ) -> EndedTask:
        def publish() -> TaskEnd:
            return weights_tasks._publish_weights(request, weights, uri, store)

        return self._task("publication", publish)

    def _task(self, what: str, work: Callable[[], TaskEnd]) -> EndedTask:
        self.did.append(what)
        self.before(what)
        return EndedTask(self.ends.pop(0) if self.ends else work())


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    made = Tasks()
    nodes = [{"NodeID": "a", "Alive": True, "Resources": {"CPU": 2.0}}]
    monkeypatch.setattr("os.nice", lambda _: 0)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray.wait", lambda tasks, timeout: (tasks[:1], tasks[1:]))
    monkeypatch.setattr("ray.cancel", lambda task, force: None)
    monkeypatch.setattr(preparation_work, "end_of", lambda task: task.end)
    for name in ("folder", "digest", "publication"):
        monkeypatch.setattr(weights_work, f"begin_{name}", getattr(made, name))
    for name in ("LOOK_S", "RETRY_S"):
        monkeypatch.setattr(preparation_work, name, 0.001)
    return made


def request_for(folder: Path) -> WeightsRequest:
    return WeightsRequest(str(folder), RemoteTierSpec(), str(folder.parent / "weights"))


def outcome(folder: Path) -> WeightsProgress:
    work = WeightsWork(request_for(folder), None, TaskSlots())
    while not work.run():
        pass
    return work.progress()


def test_a_folder_is_read_and_its_manifest_written_last(tasks: Tasks, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", files=2)
    (folder / "tokenizer.json").write_text("{}")
    store = tmp_path / "weights"
    seen = []
    tasks.before = lambda what: seen.append((what, store.exists()))
    found = outcome(folder)
    assert found.error == ""
    assert found.published is not None
    files = sorted(folder.glob("*.safetensors"))
    assert [what for what, _ in seen] == [
        *("folder", "tokenizer.json", *(file.name for file in files), "publication")
    ]
    assert not any(there for _, there in seen), "nothing is written before all is read"
    nbytes = sum(file.stat().st_size for file in files)
    assert (found.total_bytes, found.done_bytes, found.family) == (nbytes, nbytes, "qwen2")
    published = found.published
    assert published.uri == f"{store}/{published.digest}"
    content = Path(published.uri, MANIFEST).read_bytes()
    assert len(content) == published.manifest_bytes
    made = WeightSet.decode(content, published.digest, MANIFEST)
    assert [(file.name, file.nbytes) for file in made.files] == [
        (file.name, file.stat().st_size) for file in files
    ]
    assert Path(published.uri, OTHERS, "tokenizer.json").read_text() == "{}"
    assert (published.nbytes, published.dtype, published.positions) == (nbytes, "float32", 128)
    model = with_weights(
        ModelSpec.model_validate({"from": str(folder), "sequence_length": 64}), found
    )
    assert model is not None
    assert (model.dim, model.kv_heads, model.vocabulary, model.qkv_bias) == (32, 2, 320, True)
    assert (model.sequence_length, model.has_sizes) == (64, True)
    again = outcome(folder)
    assert again.published == published, "with what is there"
    elsewhere = outcome(folder.rename(tmp_path / "moved"))
    assert elsewhere.published == published, "the digest is of the content alone"


def test_a_model_of_the_library_is_tried_and_its_configuration_kept(
    tasks: Tasks, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model")
    request = replace(request_for(folder), family="transformers")
    work = WeightsWork(request, None, TaskSlots())
    assert work.run()
    found = work.progress()
    assert found.error == "" and found.published is not None
    assert found.published.config == CONFIG
    assert (found.family, found.fields) == ("qwen2", {"vocabulary": 320})
    unfit = {**CONFIG, "auto_map": {"AutoModel": "code.py"}}
    (folder / "config.json").write_text(json.dumps(unfit))
    work = WeightsWork(request, None, TaskSlots())
    assert work.run()
    assert work.progress().refusal == (
        f"{folder / 'config.json'}: it names code of its own, which is never run"
    )


def test_tasks_that_die_or_fail_for_a_while_are_repeated(tasks: Tasks, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    tasks.ends = [TaskEnd(died="WorkerCrashedError"), TaskEnd(later="the disk is away")] * 2
    found = outcome(folder)
    assert found.published is not None
    assert found.published == outcome(folder).published
    assert tasks.did[:6] == ["folder"] * 5 + [SINGLE]


def test_a_file_that_takes_its_process_with_it_each_time_is_refused(
    tasks: Tasks, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model")
    well = weights_tasks._read_published(WeightsRequest(str(folder), RemoteTierSpec(), ""))
    tasks.ends = [well, *[TaskEnd(died="OutOfMemoryError")] * MOST_DEATHS]
    assert outcome(folder).refusal == (
        f"{folder}: the process that read {SINGLE} ended 5 times (OutOfMemoryError): give the "
        "nodes more memory, or copy the folder again"
    )


def without_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def cut(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def other_shapes(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 64}))


def unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "gpt2"}))


def pickled(folder: Path) -> None:
    (folder / INDEX).unlink()
    for file in folder.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))


def own_code(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"AutoModel": "x.y"}}))


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_index, INDEX),
        (cut, "cut off"),
        (other_shapes, "mlp.gate_proj.weight"),
        (unknown_architecture, "'gpt2'"),
        (pickled, ".bin, a pickle"),
        (own_code, "code of its own"),
        (without_config, "config.json"),
    ],
)
def test_each_bad_folder_is_refused_by_name_and_nothing_is_written(
    tasks: Tasks, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    folder = write_folder(tmp_path / "model", files=2)
    damage(folder)
    found = outcome(folder)
    assert found.published is None
    assert said in found.refusal
    assert str(folder) in found.refusal
    assert not (tmp_path / "weights").exists()


def test_a_folder_that_is_not_there_is_refused(tasks: Tasks, tmp_path: Path) -> None:
    assert str(tmp_path / "gone") in outcome(tmp_path / "gone").refusal


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_that_changes_after_its_headers_were_read_is_refused(
    tasks: Tasks, tmp_path: Path, name: str
) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")

    def change(what: str) -> None:
        if what == "publication":
            if name == "config.json":
                write_folder(folder, rope_theta=7.0)
            else:
                (folder / name).write_text("[]")

    tasks.before = change
    found = outcome(folder)
    assert found.published is None
    assert "changes while it is read: submit the job once it is whole" in found.refusal
    assert not list((tmp_path / "weights").rglob(MANIFEST))


def test_the_actor_reads_a_folder_once_for_all_who_ask(
    tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenPreparer, "_give_up_unasked", lambda _: None)
    monkeypatch.setattr("holdfast_workers.log_setup.configure", lambda **_: None)
    question = codec.encode(request_for(write_folder(tmp_path / "model")))
    preparer = TokenPreparer()

    def ask() -> WeightsProgress:
        return codec.decode(preparer.ask_weights(question, None), WeightsProgress)

    eventually(lambda: ask().is_over)
    found = ask()
    assert found.error == ""
    assert found.fields == read_config(CONFIG).fields
    assert tasks.did == ["folder", SINGLE, "publication"]
