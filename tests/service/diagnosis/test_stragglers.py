"""Detection of ranks that compute more slowly than their peers, in series of times."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.service.fake_cluster import row

from holdfast_service.diagnosis.stragglers import (
    FACTOR,
    WARM_UP_STEPS,
    WINDOWS,
    PeerTimes,
    Straggler,
    change_point,
)
from holdfast_workers.protocol.messages import StepRow


def measured(step: int, times: list[float], attempt: int = 1, step_s: float = 1.0) -> StepRow:
    return replace(row(attempt, step), step_time_s=step_s, compute_s=tuple(times))


def noisy(chance: random.Random, noise: float, spikes: float) -> float:
    """A time of about one second; some steps take ten times as long."""
    return exp(chance.gauss(0.0, noise)) * (10.0 if chance.random() < spikes else 1.0)


@given(
    seed=st.integers(0, 2**32),
    world_size=st.integers(2, 16),
    noise=st.floats(0.0, 0.5),
    spikes=st.floats(0.0, 0.03),
    drift=st.floats(0.5, 2.0),
)
@settings(max_examples=60)
def test_a_noisy_healthy_job_has_no_stragglers(
    seed: int, world_size: int, noise: float, spikes: float, drift: float
) -> None:
    """Also while all ranks become slower together."""
    chance, peers = random.Random(seed), PeerTimes()
    for step in range(1, 400):
        together = drift ** (step / 400)
        times = [together * noisy(chance, noise, spikes) for _ in range(world_size)]
        assert not peers.add_row(measured(step, times)), (step, times)


def test_stages_with_more_work_are_no_stragglers_and_a_slow_rank_of_a_stage_is_one() -> None:
    chance, peers, alone = random.Random(3), PeerTimes(), PeerTimes()
    work = [1.0, 1.0, 3.0, 3.0]
    found = []
    for step in range(1, 200):
        slow = [1.0, 2.5 if step > 100 else 1.0, 1.0, 1.0]
        times = [w * s * noisy(chance, 0.05, 0.0) for w, s in zip(work, slow, strict=True)]
        found += peers.add_row(measured(step, times), stages=2)
        assert not alone.add_row(measured(step, work), stages=4)
    assert [straggler.rank for straggler in found] == [1]


@pytest.mark.seconds
def test_there_is_no_false_alarm_in_a_hundred_thousand_noisy_steps() -> None:
    chance, peers = random.Random(5), PeerTimes()
    for step in range(1, 100_001):
        times = [noisy(chance, 0.2, 0.02) for _ in range(4)]
        assert not peers.add_row(measured(step, times)), step


@given(
    seed=st.integers(0, 2**32),
    world_size=st.integers(2, 16),
    noise=st.floats(0.0, 0.12),
    factor=st.floats(2.5, 10.0),
    healthy=st.integers(20, 80),
)
@settings(max_examples=60)
def test_a_slow_rank_is_reported_within_some_steps_and_again_when_it_recovers(
    seed: int, world_size: int, noise: float, factor: float, healthy: int
) -> None:
    chance, peers = random.Random(seed), PeerTimes()
    slow = chance.randrange(world_size)
    reports: list[Straggler] = []
    for step in range(1, healthy + 61):
        times = [noisy(chance, noise, 0.0) for _ in range(world_size)]
        if healthy < step <= healthy + 30:
            times[slow] *= factor
        reports += peers.add_row(measured(step, times))
    noticed, recovered = reports
    assert noticed.rank == recovered.rank == slow
    assert not noticed.recovered and recovered.recovered
    assert healthy < noticed.step <= healthy + 3 * WINDOWS[0]
    assert abs(noticed.since_step - healthy - 1) <= 3
    assert noticed.factor > FACTOR and abs(log(noticed.factor / factor)) < 0.5
    assert healthy + 30 < recovered.step <= healthy + 30 + 2 * WINDOWS[0]
    assert not peers.slow


def test_a_rank_that_is_slow_from_the_start_is_reported() -> None:
    peers = PeerTimes()
    reports = [
        straggler
        for step in range(1, 30)
        for straggler in peers.add_row(measured(step, [1, 1, 2.0, 1.1]))
    ]
    assert [(straggler.rank, straggler.since_step) for straggler in reports] == [
        (2, 1 + WARM_UP_STEPS)
    ]


def test_all_ranks_of_a_slow_node_are_reported_even_if_they_are_half_of_all() -> None:
    peers = PeerTimes()
    reports = [
        straggler
        for step in range(1, 30)
        for straggler in peers.add_row(measured(step, [1, 1, 3, 3]))
    ]
    assert sorted(straggler.rank for straggler in reports) == [2, 3]


def test_steps_shorter_than_a_scheduler_interval_are_combined() -> None:
    """A few milliseconds on a busy machine do not characterise a rank."""
    peers = PeerTimes()
    reports = []
    for step in range(1, 200):
        slow = 5.0 if 50 <= step < 60 else 1.0  # 0.1 s
        reports += peers.add_row(measured(step, [0.01, 0.01 * slow], step_s=0.01))
    assert not reports
    for step in range(200, 600):
        reports += peers.add_row(measured(step, [0.01, 0.03], step_s=0.03))
    assert [straggler.rank for straggler in reports] == [1]
    assert 150 <= reports[0].since_step <= 230


def test_repeated_rows_count_once_and_a_new_attempt_resets_the_series() -> None:
    peers = PeerTimes()
    rows = [measured(step, [1.0, 3.0]) for step in range(1, 9)]
    for _ in range(5):
        assert not [straggler for row in rows for straggler in peers.add_row(row)]
    for attempt in (2, 3):
        for step in range(9, 16):
            assert not peers.add_row(measured(step, [1.0, 3.0], attempt))


def test_a_single_rank_or_a_row_without_times_has_no_straggler() -> None:
    peers = PeerTimes()
    for step in range(1, 50):
        assert not peers.add_row(measured(step, [1.0]))
    for step in range(50, 100):
        assert not peers.add_row(measured(step, []))


@given(
    before=st.integers(3, 40),
    after=st.integers(3, 40),
    jump=st.floats(1.0, 5.0),
    seed=st.integers(0, 2**32),
)
def test_the_change_point_is_the_step_at_which_the_level_rises(
    before: int, after: int, jump: float, seed: int
) -> None:
    chance = random.Random(seed)
    series = [chance.uniform(-0.1, 0.1) for _ in range(before)]
    series += [jump + chance.uniform(-0.1, 0.1) for _ in range(after)]
    assert change_point(series) == before
    assert change_point([-value for value in series]) == 0, "it fell"
