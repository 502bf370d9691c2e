"""What a node agent sets of its ranks: each series follows them, also away from the node."""

from __future__ import annotations

from dataclasses import replace

from tests.support.service.fake_cluster import row

from holdfast_service.cluster.rank_metrics import GAUGES, GONE, PHASE, STEP, STEP_TIME, samples
from holdfast_workers.protocol.messages import Beat

BEAT = Beat(0, "n0.a.1", 100, 1, 7, "forward", 0, 0.25, 3.0)


def test_each_rank_has_its_step_phase_and_silence_and_its_own_work() -> None:
    newest = replace(row(1, 6), compute_s=(0.05, 0.07))
    found = samples((BEAT, replace(BEAT, rank=1, step=6)), newest, set())
    values = {(item.series.name, item.rank): item.value for item in found}
    assert values["holdfast_rank_step", "0"] == 7.0
    assert values["holdfast_rank_step", "1"] == 6.0
    assert values["holdfast_rank_silent_seconds", "0"] == 0.25
    assert values["holdfast_rank_compute_seconds", "1"] == 0.07
    assert values["holdfast_step_seconds", ""] == 0.1
    assert {entry.series for entry in found} == set(GAUGES)


def test_a_rank_is_in_one_phase_and_says_when_it_has_gone() -> None:
    known: set[tuple[str, str]] = set()
    samples((BEAT,), None, known)
    later = samples((replace(BEAT, phase="backward"),), None, known)
    phases = {item.phase: item.value for item in later if item.series is PHASE}
    assert phases == {"forward": 0.0, "backward": 1.0}
    gone = samples((), None, known)
    assert [entry.value for entry in gone if entry.series is STEP] == [GONE]
    assert {element.value for element in gone if element.series is PHASE} == {0.0}
    assert not [sample for sample in gone if sample.series is STEP_TIME]
