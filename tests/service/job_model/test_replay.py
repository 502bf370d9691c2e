"""The spec of a replay."""

from __future__ import annotations

from typing import Any

from holdfast_service.job_model.job_spec import parse
from holdfast_service.job_model.mesh_history import MeshSpan
from holdfast_service.job_model.replay import ReplayMark, replay_document, replay_mark
from holdfast_workers.spec import DataSpec, SourceSpec

MARK = ReplayMark("0199aaaa-0000-7000-8000-000000000000", 120)
ELASTIC: dict[str, Any] = {
    "name": "n" * 63,
    "labels": {"owner": "ada", **{f"label{number}": "x" for number in range(15)}},
    "parallel": {"dp_shard": "auto", "tp": 2},
    "resources": {"nodes": {"min": 1, "max": 3}, "workers_per_node": 2, "standby_nodes": 2},
    "train": {"global_batch": 24, "micro_batch": 4},
    "checkpoint": {"memory": {"every_steps": 0}, "remote": {"every_steps": 20}},
}
HISTORY = (MeshSpan(0, {"dp_shard": 3, "tp": 2}), MeshSpan(40, {"dp_shard": 2, "tp": 2}))


def test_the_replay_of_an_elastic_job_follows_its_meshes_and_is_a_valid_spec() -> None:
    spec = parse(ELASTIC, None)
    replay = parse(replay_document(spec, MARK, HISTORY, None), None)
    assert [(step, shape.mesh["dp_shard"]) for step, shape in replay.schedule] == [(0, 3), (40, 2)]
    assert (replay.needed_nodes, replay.resources.standby_nodes) == (3, 0)
    assert replay.checkpoint.first_intervals == (1, 0)
    assert replay.name == "n" * 56 + "-replay"
    assert replay.labels["owner"] == "ada"
    assert replay_mark(replay.model_dump(mode="json")) == MARK
    changed = {"name", "labels", "resources", "checkpoint"}
    assert replay.model_dump(exclude=changed) == spec.model_dump(exclude=changed)


def test_the_replay_of_a_replay_follows_its_own_meshes_only() -> None:
    first = parse(replay_document(parse(ELASTIC, None), MARK, HISTORY, None), None)
    second = parse(replay_document(first, ReplayMark("other", 30), HISTORY[:1], None), None)
    assert [step for step, _ in second.schedule] == [0]
    assert replay_mark(second.model_dump(mode="json")) == ReplayMark("other", 30)


def test_a_job_of_one_mesh_is_replayed_without_a_schedule() -> None:
    spec = parse({"name": "x", "checkpoint": {"memory": {"every_steps": 0}}}, None)
    replay = parse(replay_document(spec, MARK, HISTORY[:1], None), None)
    assert (replay.schedule, replay.resources.nodes) == ((), None)
    assert replay.checkpoint.first_intervals == (0, 0)


def test_a_replay_starts_from_the_checkpoint_that_was_resolved_for_the_job() -> None:
    spec = parse({"name": "x", "init_from": "other-job"}, None)
    origin = {"uri": "/remote/other/step-20", "step": 20, "what": "everything", "held": True}
    replay = parse(replay_document(spec, MARK, (), origin), None)
    assert replay.init_from is not None
    assert (replay.init_from.source, replay.init_from.what) == (origin["uri"], "everything")


def test_a_replay_reads_the_token_sets_of_the_job() -> None:
    data = DataSpec(sources=(SourceSpec(path="/data/a.parquet"), SourceSpec(path="/data/b.jsonl")))
    sets = [
        {
            "uri": f"/sets/{at}",
            "origin": data.origin_of(source),
            "digest": "0123456789abcdef" * 2,
            "vocabulary": 256,
            "tokens": 7,
            "held_out": 0,
            "sequence_length": 256,
            "samples": 1,
            "tokenizer": "1" * 32,
            "tokenizer_files": "2" * 32,
            "document_end": 0,
        }
        for at, source in enumerate(data.sources)
    ]
    document = {**data.model_dump(mode="json"), "prepared": sets}
    spec = parse({"name": "x", "data": document, "train": {"epochs": 500}}, None)
    assert spec.train.steps == 63  # 500 times 2 samples, in batches of 16
    replay = parse(replay_document(spec, MARK, (), None), None)
    assert [each.model_dump() for each in replay.data.prepared] == sets
    assert replay.train == spec.train


def test_labels_that_no_replay_has_are_no_mark() -> None:
    for labels in ({}, {"replay-of": "x"}, {"replay-until": "3"}):
        assert replay_mark({"labels": labels}) is None
    assert replay_mark({"labels": {"replay-of": "x", "replay-until": "many"}}) is None
