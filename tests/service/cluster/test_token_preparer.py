"""What the preparer makes of the ends of its tasks, without Ray: another try, another node, or a
refusal, each with its reason."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from tests.support.service.ended_task import EndedTask
from tests.support.service.unwatched import Unwatched
from tests.support.waiting import eventually

from holdfast_service.cluster import preparation_tasks, preparation_work, token_preparer
from holdfast_service.cluster.preparation_tasks import TaskEnd, TaskSlots
from holdfast_service.cluster.preparation_work import MOST_DEATHS
from holdfast_service.cluster.ray_cluster import RayCluster
from holdfast_service.cluster.token_preparer import SourceWork, TokenPreparer
from holdfast_service.job_model.preparation import (
    PreparePhase,
    SourceProgress,
    SourceRequest,
    refusals,
    requests_of,
    wait_text,
)
from holdfast_service.job_model.supervisor_protocol import ClusterUnavailable
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage, TransientStorageError
from holdfast_workers.data.token_set import shard_digest
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.published.kept_tokenizer import kept_tokenizer
from holdfast_workers.spec import (
    CheckpointSpec,
    DataSpec,
    ModelSpec,
    RemoteTierSpec,
    SourceSpec,
    SpecialTokenSpec,
    TrainingSpec,
)
from holdfast_workers.spec.train import ValidationSpec
from holdfast_workers.token_sets.plan import Part, plan_parts
from holdfast_workers.token_sets.prepare import make_part
from holdfast_workers.token_sets.source_files import list_source
from holdfast_workers.token_sets.tokenizer_file import read_tokenizer

NODES = ("a", "b")


@dataclass
class FakeTasks:
    """Tasks that end at once, in this process: the first ones as `ends` says, later ones well."""

    request: SourceRequest
    scratch: Path
    ends: list[TaskEnd] = field(default_factory=list)
    ran_on: list[str] = field(default_factory=list)
    apart_from: Sequence[StorageOptions] = ()
    """As the last plan got them."""
    kept: list[TaskEnd] = field(default_factory=list)
    """What the preparer holds itself, as no node does that may be lost."""
    dies: int | None = None
    """The part whose process always dies, in the middle of its work."""

    def begin_plan(
        self,
        node: str,
        request: SourceRequest,
        source: StorageOptions,
        apart_from: Sequence[StorageOptions],
    ) -> EndedTask:
        self.apart_from = apart_from
        tokenizer = read_tokenizer(request.data)
        files = list_source(request.source, source)
        plan = plan_parts(request.source, files, tokenizer.facts, request.data, part_bytes=40)
        return self._end(node, TaskEnd((plan, tokenizer)))

    def begin_part(
        self, node: str, shared: TaskEnd, part: Part, uri: str, store: Any, source: Any
    ) -> EndedTask:
        assert shared in self.kept
        plan, tokenizer = shared.result
        if part.index == self.dies:
            return self._end(node, TaskEnd(died="WorkerCrashedError"))
        storage = open_storage(uri, store)
        made = make_part(plan, part, tokenizer, storage, source, self.scratch, lambda _: None)
        return self._end(node, TaskEnd(made))

    def keep(self, end: TaskEnd) -> TaskEnd:
        self.kept.append(end)
        return end

    def _end(self, node: str, well: TaskEnd) -> EndedTask:
        self.ran_on.append(node)
        return EndedTask(self.ends.pop(0) if self.ends else well)


LENGTH = 10


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTasks:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(f'{{"text": "document {number}"}}\n' for number in range(6)))
    data = DataSpec(sources=(SourceSpec(path=str(source)),))
    spec = TrainingSpec(data=data)
    (request,) = requests_of(spec, str(tmp_path / "tokens"), refuse_local=False)
    (tmp_path / "scratch").mkdir()
    made = FakeTasks(request, tmp_path / "scratch")
    nodes = [{"NodeID": node, "Alive": True, "Resources": {"CPU": 1.0}} for node in NODES]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray.wait", lambda tasks, timeout: (tasks[:1], tasks[1:]))
    monkeypatch.setattr("ray.cancel", lambda task, force: None)
    monkeypatch.setattr("ray.put", made.keep)
    monkeypatch.setattr(token_preparer, "begin_plan", made.begin_plan)
    monkeypatch.setattr(token_preparer, "begin_part", made.begin_part)
    monkeypatch.setattr(preparation_work, "end_of", lambda task: task.end)
    for name in ("LOOK_S", "RETRY_S"):
        monkeypatch.setattr(preparation_work, name, 0.001)
    return made


def outcome(tasks: FakeTasks) -> SourceProgress:
    work = SourceWork(tasks.request, (None, None), TaskSlots())
    while not work.run():
        pass
    return work.progress(LENGTH)


def test_each_source_that_is_compared_is_reached_with_its_own_secret(tasks: FakeTasks) -> None:
    others = tuple(
        SourceSpec(path=f"s3://lab/{name}", endpoint=f"https://{name}.example.com", region=name)
        for name in ("web", "code")
    )
    tasks.request = replace(tasks.request, apart_from=others, refuse_local=True)
    secrets = [{"access_key_id": name} for name in ("web", "code")]
    work = SourceWork(tasks.request, (None, None, *secrets), TaskSlots())
    work.run()
    assert work.progress(LENGTH).phase is PreparePhase.READY
    assert [
        (each.endpoint, each.region, each.credentials, each.refuse_local)
        for each in tasks.apart_from
    ] == [
        (f"https://{name}.example.com", name, {"access_key_id": name}, True)
        for name in ("web", "code")
    ]


@pytest.mark.parametrize(
    ("missing", "place"), [("web", "data.sources.secret"), ("held", "data.validation.secret")]
)
def test_a_secret_that_is_gone_is_named_by_its_place(
    tmp_path: Path, missing: str, place: str
) -> None:
    for name in ("web", "held"):
        keys = {"access_key_id": name, "secret_access_key": "x", "bucket": name}
        (tmp_path / f"{name}.json").write_text(json.dumps(keys))
        (tmp_path / f"{name}.json").chmod(0o600)
    source = SourceSpec(path="s3://web/a", secret="web")
    apart = ValidationSpec(path="s3://held/a", secret="held")
    spec = TrainingSpec(data=DataSpec(sources=(source,), validation=apart))
    _, request = requests_of(spec, "/tokens", refuse_local=False)
    cluster = RayCluster("", b"", tmp_path, can_grow=False, connection=Unwatched())
    _, credentials = cluster._question(request)
    assert [each and each["access_key_id"] for each in credentials] == [None, "held", "web"]
    (tmp_path / f"{missing}.json").unlink()
    with pytest.raises(ClusterUnavailable, match=f"^{place}: the server has no secret '{missing}'"):
        cluster._question(request)


def test_the_plan_of_validation_is_refused_for_a_file_that_a_source_has(
    tasks: FakeTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.nice", lambda _: 0)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    options = StorageOptions()
    own = tasks.request.source
    apart = SourceSpec(path="s3://lab/web")
    for others, why in (((apart,), ""), ((apart, own), f"{own.path} is in the source {own.path}")):
        request = replace(tasks.request, apart_from=others)
        end = preparation_tasks._plan(request, options, [options] * len(others))
        assert end.refused.startswith(why)
        assert (end.result is None) == bool(why)


def test_tasks_that_die_or_fail_for_a_while_are_repeated(tasks: FakeTasks) -> None:
    undisturbed = outcome(tasks)
    assert undisturbed.phase is PreparePhase.READY, undisturbed.error
    for path in Path(tasks.request.root).rglob("*"):
        if path.is_file():
            path.unlink()
    tasks.ends = [TaskEnd(died="WorkerCrashedError"), TaskEnd(later="the bucket is away")] * 2
    assert outcome(tasks).prepared == undisturbed.prepared
    assert undisturbed.prepared is not None
    assert undisturbed.prepared.uri.startswith(f"{tasks.request.root}/")
    assert undisturbed.documents == 6
    # Three shards of two documents of ten bytes, each with its end.
    assert (undisturbed.tokens, undisturbed.prepared.samples) == (66, 9)
    assert undisturbed.prepared.sequence_length == LENGTH
    assert undisturbed.prepared.tokenizer == shard_digest(b"bytes")
    assert undisturbed.prepared.document_end == 0
    assert undisturbed.special_tokens == {"document_end": SpecialTokenSpec(id=0)}


REMEDY = "give the nodes more memory, or repair, divide or leave out the file at fault"


def test_a_process_that_dies_again_and_again_refuses_the_source(tasks: FakeTasks) -> None:
    tasks.ends = [TaskEnd(died="OutOfMemoryError")] * MOST_DEATHS
    found = outcome(tasks)
    assert (found.phase, found.error) == (
        PreparePhase.REFUSED,
        "the process that made the list of its files ended 5 times (OutOfMemoryError): " + REMEDY,
    )
    assert len(tasks.ran_on) == MOST_DEATHS


def test_a_part_that_takes_its_process_with_it_each_time_is_refused_with_its_file(
    tasks: FakeTasks,
) -> None:
    """The deaths of other parts do not count, and what these made stays."""
    tasks.dies = 1
    found = outcome(tasks)
    assert found.phase is PreparePhase.REFUSED
    name = tasks.request.source.path
    assert found.error == (
        f"the process that made part 1, of {name}, ended 5 times (WorkerCrashedError): {REMEDY}"
    )
    assert refusals([found]) == f"{name}: {found.error}"
    made = {path.name for path in Path(tasks.request.root).rglob("parts/*")}
    assert made == {"00000000.json", "00000002.json", "00000003.json"}
    tasks.dies = None
    assert outcome(tasks).phase is PreparePhase.READY


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (WorkerCrashedError(), TaskEnd(died="WorkerCrashedError")),
        (OutOfMemoryError("killed"), TaskEnd(died="OutOfMemoryError")),
        (
            RayTaskError("_make_part", "", ObjectLostError("01", "", "")),
            TaskEnd(died="ObjectLostError"),
        ),
        (RayTaskError("_make_part", "", ValueError("no")), TaskEnd(refused="...")),
    ],
)
def test_a_task_without_an_answer_died_or_its_source_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: RayError, expected: TaskEnd
) -> None:
    def get(_: Any) -> TaskEnd:
        raise error

    monkeypatch.setattr("ray.get", get)
    end = preparation_tasks.end_of(None)
    assert replace(end, refused="..." if end.refused else "") == expected


def test_a_node_that_is_unfit_gets_no_task_again(tasks: FakeTasks) -> None:
    tasks.ends = [TaskEnd(unfit="no pyarrow")]
    assert outcome(tasks).phase is PreparePhase.READY
    (unfit, *others) = tasks.ran_on
    assert unfit not in others


def test_nodes_that_are_all_unfit_are_tried_again_once_they_may_be_mended(
    tasks: FakeTasks,
) -> None:
    tasks.ends = [TaskEnd(unfit="no pyarrow")] * len(NODES)
    assert outcome(tasks).phase is PreparePhase.READY


def test_a_refusal_ends_it_with_its_sentence(tasks: FakeTasks) -> None:
    tasks.ends = [TaskEnd(refused="a.jsonl, row 3: it is no JSON")]
    assert outcome(tasks).error == "a.jsonl, row 3: it is no JSON"


def test_the_storage_of_another_form_has_the_address_that_the_job_names(
    tasks: FakeTasks, tmp_path: Path
) -> None:
    remote = RemoteTierSpec(uri=f"file://{tmp_path}/store")
    root = f"file://{tmp_path}/store/tokens"
    spec = TrainingSpec(data=tasks.request.data, checkpoint=CheckpointSpec(remote=remote))
    (tasks.request,) = requests_of(spec, root, refuse_local=False)
    found = outcome(tasks)
    assert found.prepared is not None
    assert found.prepared.uri.startswith(f"{root}/")


def test_silence_is_said_and_an_outcome_that_nobody_fetched_is_found_anew(
    tasks: FakeTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = SourceWork(tasks.request, (None, None), TaskSlots())
    assert work.progress(LENGTH).waits == "it waits for other preparations"
    work._note(waits="")
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 125.0)
    silent = work.progress(LENGTH)
    assert wait_text([silent]) == (
        "its sources are being listed; its files are being listed, and nothing has ended for "
        "2 min 5 s"
    )
    work.run()
    assert work.progress(LENGTH).is_over and not work.is_stale
    monkeypatch.setattr(time, "monotonic", lambda: began + 140.0)
    assert work.is_stale


def answered(preparer: TokenPreparer, request: SourceRequest) -> SourceProgress:
    answer = preparer.ask(codec.encode(request), (None, None))
    return codec.decode(answer, SourceProgress)


def test_sources_whose_bucket_is_away_let_others_be_prepared(
    tasks: FakeTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_preparer, "AT_ONCE", 1)
    monkeypatch.setattr(token_preparer, "ABANDONED_S", 1e9)
    away = replace(tasks.request, root=f"{tasks.request.root}/away")
    down = [True]

    def opened(uri: str, options: StorageOptions) -> Storage:
        if uri.startswith(away.root) and down:
            raise TransientStorageError(uri, "no answer")
        return open_storage(uri, options)

    monkeypatch.setattr(token_preparer, "open_storage", opened)
    preparer = TokenPreparer()
    eventually(lambda: "no answer" in answered(preparer, away).waits)
    eventually(lambda: answered(preparer, tasks.request).phase is PreparePhase.READY)
    assert "no answer" in answered(preparer, away).waits
    down.clear()
    eventually(lambda: answered(preparer, away).phase is PreparePhase.READY)


def test_a_source_says_that_others_use_all_nodes(tasks: FakeTasks) -> None:
    slots = TaskSlots()
    taken = [node for _ in NODES if (node := slots.take())]
    work = SourceWork(tasks.request, (None, None), slots)
    thread = threading.Thread(target=work.run)
    thread.start()
    eventually(lambda: work.progress(LENGTH).waits == "all nodes are busy with other preparations")
    slots.give_back(taken.pop())
    thread.join(60)
    assert work.progress(LENGTH).phase is PreparePhase.READY


@pytest.mark.parametrize("fails", ["begin_plan", "begin_part", "end_of"])
def test_an_error_of_ray_takes_no_place_of_other_sources(
    tasks: FakeTasks, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def fail(*_: Any) -> TaskEnd:
        raise RuntimeError("no connection")

    slots = TaskSlots()
    with monkeypatch.context() as broken:
        broken.setattr(preparation_work if fails == "end_of" else token_preparer, fails, fail)
        work = SourceWork(tasks.request, (None, None), slots)
        assert work.run()
        assert "RuntimeError" in work.progress(LENGTH).error
    assert [slots.take() is not None for _ in range(len(NODES) + 1)] == [True, True, False]


def test_two_jobs_with_one_source_at_once_prepare_it_once(
    tasks: FakeTasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their other sources, weights and sequences are."""
    monkeypatch.setattr(TokenPreparer, "_give_up_unasked", lambda _: None)
    monkeypatch.setattr("holdfast_workers.log_setup.configure", lambda **_: None)
    both_asked = threading.Event()

    def begin_plan(*arguments: Any) -> EndedTask:
        assert both_asked.wait(60)
        return tasks.begin_plan(*arguments)

    monkeypatch.setattr(token_preparer, "begin_plan", begin_plan)
    source = tasks.request.source
    other = SourceSpec(path=f"{tmp_path}/other.jsonl", weight=0.3)
    mixed = TrainingSpec(
        data=DataSpec(sources=(source.model_copy(update={"weight": 0.7}), other)),
        model=ModelSpec(sequence_length=2 * LENGTH),
    )
    of_mixed, _ = requests_of(mixed, tasks.request.root, refuse_local=False)
    questions = [codec.encode(request) for request in (tasks.request, of_mixed)]
    preparer = TokenPreparer()

    def ask() -> list[SourceProgress]:
        answers = [preparer.ask(each, (None, None)) for each in questions]
        return [codec.decode(answer, SourceProgress) for answer in answers]

    assert {answer.phase for answer in ask()} == {PreparePhase.LISTING}
    both_asked.set()
    eventually(lambda: all(answer.is_over for answer in ask()))
    first, second = (answer.prepared for answer in ask())
    assert first is not None and second is not None
    assert (first.uri, first.digest) == (second.uri, second.digest)
    assert first.samples != second.samples
    assert len(tasks.ran_on) == 1 + 4, "the plan, and each part once"


def test_the_files_of_a_tokenizer_are_kept_beside_its_set(tasks: FakeTasks, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    words = {"<unk>": 0, "</s>": 1, "document": 2}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "weights").write_text("not of the tokenizer")
    data = tasks.request.data.model_copy(update={"tokenizer": str(folder)})
    tasks.request = replace(tasks.request, data=data)
    prepared = outcome(tasks).prepared
    assert prepared is not None
    storage = open_storage(prepared.uri)
    expected = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    assert len(expected) == 2
    assert kept_tokenizer(prepared, storage) == expected
    (folder / "chat_template.jinja").write_text("of a later preparation")
    later = outcome(tasks).prepared
    assert later is not None and (later.uri, later.digest) == (prepared.uri, prepared.digest)
    assert kept_tokenizer(later, storage).keys() - expected.keys() == {"chat_template.jinja"}
    assert kept_tokenizer(prepared, storage) == expected
    storage.below("tokenizer").delete_all()  # as an earlier version left the set
    assert outcome(tasks).prepared == later
    assert kept_tokenizer(later, storage)
