"""The order of meshes by throughput, and the weighing of a growth against its pause."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.placement.mesh_throughput import (
    ALWAYS_GROW,
    Speed,
    expected_speeds,
    modelled_speed,
    ranked,
    worth_growing,
)
from holdfast_service.placement.world_shape import WorldShape

SHAPES = tuple(WorldShape.of({"dp_shard": ranks, "tp": 2}, 2) for ranks in (8, 6, 4, 3, 2))
EIGHT, SIX, FOUR, THREE, TWO = SHAPES
MEASURED = st.dictionaries(st.sampled_from(SHAPES), st.floats(1.0, 1e6))
GAINS = st.sampled_from((ALWAYS_GROW, 0.0, 0.05, 0.5))


def growth(present: Speed, larger: Speed, remaining: float | None = 1e9) -> tuple[bool, str]:
    verdict = worth_growing(
        present, larger, min_gain=0.05, pause_s=10.0, remaining_tokens=remaining
    )
    return verdict.is_worth, verdict.reason


def test_a_step_takes_as_long_as_its_passes() -> None:
    assert [round(1 / modelled_speed(shape, 8) * 2) for shape in SHAPES] == [1, 2, 2, 3, 4]
    speeds = expected_speeds(SHAPES, {}, 8)
    assert ranked(SHAPES, speeds, EIGHT, 0.05) == SHAPES
    assert not growth(speeds[FOUR], speeds[SIX])[0], "both need two passes"


def test_a_measurement_wins_over_the_model_and_gives_it_its_scale() -> None:
    speeds = expected_speeds(SHAPES, {FOUR: 1000.0, SIX: 900.0}, 8)
    assert (speeds[SIX].value, speeds[SIX].is_measured) == (900.0, True)
    assert (speeds[TWO].value, speeds[TWO].is_measured) == (500.0, False)
    assert ranked(SHAPES, speeds, FOUR, 0.05)[:2] == (EIGHT, FOUR)
    worth, why = growth(speeds[FOUR], speeds[SIX])
    assert not worth
    assert why == "-10% expected (measured 900 tokens/s; now measured 1,000 tokens/s), 5% needed"
    assert "modelled 1,800 tokens/s, not measured" in growth(speeds[FOUR], speeds[EIGHT])[1]


def test_a_growth_must_save_more_time_than_its_pause_takes() -> None:
    slow, fast = Speed(1000.0, is_measured=True), Speed(2000.0, is_scaled=True)
    assert growth(slow, fast, remaining=30_000.0)[0], "15 s saved"
    worth, why = growth(slow, fast, remaining=19_000.0)
    assert not worth
    assert why.endswith("saves 10 s of 19 s, a pause of 10.0 s")


def test_what_is_not_measured_is_called_so_and_is_not_zero() -> None:
    worth, why = growth(Speed(1.0), Speed(2.0), remaining=None)
    assert worth
    assert why.endswith("the remaining time is not measured")


def test_the_present_mesh_gives_way_only_to_a_faster_one() -> None:
    speeds = expected_speeds(SHAPES, {SIX: 1000.0, FOUR: 1040.0, EIGHT: 1.0}, 8)
    assert ranked(SHAPES, speeds, SIX, 0.05)[0] == SIX
    assert ranked(SHAPES, speeds, FOUR, 0.05)[0] == FOUR
    assert ranked(SHAPES, speeds, FOUR, ALWAYS_GROW) == SHAPES


@given(measured=MEASURED, present=st.sampled_from(SHAPES), gain=GAINS, data=st.data())
def test_the_order_is_total_and_does_not_depend_on_the_other_meshes(
    measured: dict[WorldShape, float],
    present: WorldShape,
    gain: float,
    data: st.DataObject,
) -> None:
    speeds = expected_speeds(SHAPES, measured, 8)
    order = ranked(SHAPES, speeds, present, gain)
    assert sorted(order, key=SHAPES.index) == list(SHAPES)
    assert ranked(SHAPES, speeds, present, gain) == order
    some = data.draw(st.lists(st.sampled_from(SHAPES), unique=True))
    kept = tuple(shape for shape in SHAPES if shape in some)
    assert ranked(kept, speeds, present, gain) == tuple(s for s in order if s in some)


@given(
    measured=MEASURED,
    present=st.sampled_from(SHAPES),
    gain=st.sampled_from((0.0, 0.05, 0.5)),
    nodes=st.integers(2, 8),
    more=st.integers(0, 8),
)
def test_more_room_never_gives_a_slower_mesh(
    measured: dict[WorldShape, float], present: WorldShape, gain: float, nodes: int, more: int
) -> None:
    speeds = expected_speeds(SHAPES, measured, 8)
    order = ranked(SHAPES, speeds, present, gain)

    def chosen(room: int) -> WorldShape:
        return next(shape for shape in order if shape.nodes <= room)

    def weight(shape: WorldShape) -> float:
        return speeds[shape].value * (1 + gain if shape == present else 1)

    assert weight(chosen(nodes + more)) >= weight(chosen(nodes))


@given(measured=MEASURED, present=st.sampled_from(SHAPES), gain=st.sampled_from((0.0, 0.05, 0.5)))
def test_a_mesh_that_is_worth_growing_to_is_not_left_again_by_choice(
    measured: dict[WorldShape, float], present: WorldShape, gain: float
) -> None:
    speeds = expected_speeds(SHAPES, measured, 8)
    for shape in SHAPES[: SHAPES.index(present)]:
        grows = worth_growing(
            speeds[present], speeds[shape], min_gain=gain, pause_s=0.1, remaining_tokens=1e9
        )
        if grows.is_worth:
            assert ranked((shape, present), speeds, shape, gain)[0] == shape
