"""The metrics of a node's ranks follow the ranks, also when they leave the node."""

from __future__ import annotations

from dataclasses import replace

from tests.support.service.fake_cluster import row

from holdfast_service.cluster.rank_metrics import GAUGES, GONE, PHASE, STEP, STEP_TIME, samples
from holdfast_workers.protocol.messages import Beat

BEAT = Beat(0, "n0.a.1", 100, 1, 7, "forward", 0, 0.25, 3.0)


def test_each_rank_exports_its_step_phase_silence_and_compute_time() -> None:
    newest = replace(row(1, 6), compute_s=(0.05, 0.07))
    found = samples((BEAT, replace(BEAT, rank=1, step=6)), newest, set())
    values = {(sample.series.name, sample.rank): sample.value for sample in found}
    assert values["holdfast_rank_step", "0"] == 7.0
    assert values["holdfast_rank_step", "1"] == 6.0
    assert values["holdfast_rank_silent_seconds", "0"] == 0.25
    assert values["holdfast_rank_compute_seconds", "1"] == 0.07
    assert values["holdfast_step_seconds", ""] == 0.1
    assert {sample.series for sample in found} == set(GAUGES)


def test_a_rank_is_in_one_phase_and_its_departure_is_exported() -> None:
    known: set[tuple[str, str]] = set()
    samples((BEAT,), None, known)
    later = samples((replace(BEAT, phase="backward"),), None, known)
    phases = {sample.phase: sample.value for sample in later if sample.series is PHASE}
    assert phases == {"forward": 0.0, "backward": 1.0}
    gone = samples((), None, known)
    assert [sample.value for sample in gone if sample.series is STEP] == [GONE]
    assert {sample.value for sample in gone if sample.series is PHASE} == {0.0}
    assert not [sample for sample in gone if sample.series is STEP_TIME]
