"""The training core in real gloo worlds: same curve on any mesh, same bits after faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.rank_worlds import FLAGS, Worlds, tiny_spec
from tests.support.ranks.world_checks import (
    STOP,
    assert_one_curve,
    assert_rebinds,
    assert_replaced,
    assert_same_curve,
    digests_of,
    rows_of,
)

from holdfast_workers.protocol.metrics import METRICS
from holdfast_workers.spec import DetectionSpec, GuardsSpec, NonfiniteGuardSpec
from holdfast_workers.training.skipped_windows import Ledger

FULL = {"dp_shard": 2, "tp": 2}
REPLICAS = {"dp_replicate": 2, "dp_shard": 2}


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def soak(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


MESHES_WITH_TP = (FULL, slow({"tp": 2}), slow({"dp_replicate": 2, "tp": 2}))
TIMES = [name for name, metric in METRICS.items() if metric.unit == "s"]


@pytest.fixture(scope="module")
def states(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every rank's state of every step of the undisturbed run."""
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def undisturbed(worlds: Worlds, states: Path) -> dict[str, Any]:
    """The 2 × 2 run with dropout that every faulted run must equal."""
    outcomes: list[dict[str, Any]] = worlds.run(
        programs.undisturbed, tiny_spec(FULL, dropout=0.1), states
    )
    return outcomes[0]


@pytest.mark.seconds
@pytest.mark.parametrize(
    "mesh",
    [
        FULL,
        REPLICAS,
        {"dp_replicate": 2, "tp": 2},
        {"dp_shard": 3},
        *map(
            slow,
            (
                {"dp_shard": 4},
                {"tp": 2},
                {"dp_shard": 2},
                {"dp_replicate": 2},
                {"dp_replicate": 4},
                {"dp_replicate": 3},
            ),
        ),
    ],
    ids=lambda mesh: ",".join(f"{axis}={size}" for axis, size in mesh.items()),
)
def test_every_mesh_follows_the_curve_of_one_process(worlds: Worlds, mesh: dict[str, int]) -> None:
    assert_same_curve(rows_of(worlds, tiny_spec({})), rows_of(worlds, tiny_spec(mesh)))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_without_shards_have_the_same_bits_at_every_step(
    worlds: Worlds, replicas: int
) -> None:
    states = worlds.run(programs.states, tiny_spec({"dp_replicate": replicas}, dropout=0.1))
    assert len(set(states[0])) == 6
    assert all(state == states[0] for state in states)


@pytest.mark.slow
def test_replicas_have_the_same_bits_at_every_step(worlds: Worlds) -> None:
    spec = tiny_spec({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, steps=3, dropout=0.1)
    states = worlds.run(programs.states, spec)
    for first, second in zip(states[:4], states[4:], strict=True):
        assert len(first) == 3
        assert first == second
    assert len({state[-1] for state in states[:4]}) == 4


@pytest.mark.slow
def test_every_rank_reports_the_same_rows_and_digests(worlds: Worlds) -> None:
    results = worlds.once(programs.undisturbed, tiny_spec(FULL, steps=2))
    for result in results[1:]:
        assert result["digests"] == results[0]["digests"]
        for mine, other in zip(result["rows"], results[0]["rows"], strict=True):
            assert (mine.loss, mine.grad_norm) == (other.loss, other.grad_norm)


@pytest.mark.seconds
def test_every_row_has_the_measured_times_of_its_step(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["rows"]
    for row in undisturbed["rows"]:
        assert row.step_time_s > 0
        for name in TIMES:
            assert getattr(row, name) >= 0, f"{name} of step {row.step}"


@pytest.mark.seconds
def test_the_phases_of_a_step_are_in_order(undisturbed: dict[str, Any]) -> None:
    of_step_3 = [name for name, step in undisturbed["phases"] if step == 3]
    assert of_step_3 == [
        *["load", "forward", "backward"] * 2,
        "agree",
        "gate",
        "optimizer",
        "checkpoint",
    ]


@pytest.mark.seconds
def test_two_runs_have_the_same_bits(worlds: Worlds, undisturbed: dict[str, Any]) -> None:
    again = digests_of(worlds, tiny_spec(FULL, dropout=0.1))
    assert again == undisturbed["digests"]
    assert sorted(again) == list(range(7))
    assert len(set(again.values())) == 7


@pytest.mark.seconds
def test_new_processes_resume_from_a_saved_state_with_the_same_bits(
    worlds: Worlds, undisturbed: dict[str, Any], states: Path
) -> None:
    digests = worlds.run(programs.resumed, tiny_spec(FULL, dropout=0.1), states, 3)[0]
    assert digests == {step: undisturbed["digests"][step] for step in range(3, 7)}


@pytest.mark.slow
def test_a_digest_is_the_same_from_a_payload_and_from_live_tensors(
    worlds: Worlds, tmp_path: Path
) -> None:
    for filled, streamed in worlds.run(
        programs.digests_both_ways, tiny_spec(FULL, steps=2), tmp_path
    ):
        assert filled == streamed


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("mesh", "model", "rebuild"),
    [
        (FULL, {}, False),
        (FULL, {}, True),
        ({"dp_replicate": 2, "tp": 2}, {}, False),
        slow({"dp_replicate": 2, "tp": 2}, {}, True),
        *(soak({"dp_replicate": 3}, {}, rebuild) for rebuild in (False, True)),
        slow(FULL, {"tied_embeddings": True}, False),
        *(slow({**FULL, "vocabulary_parallel": True}, {}, rebuild) for rebuild in (False, True)),
        slow({**FULL, "sequence_parallel": True}, {}, False),
        slow({**FULL, "sequence_parallel": True}, {"activation_checkpointing": "selective"}, False),
    ],
    ids=str,
)
def test_survivors_rebind_to_new_groups_with_the_same_bits(
    worlds: Worlds, mesh: dict[str, Any], model: dict[str, Any], rebuild: bool
) -> None:
    assert_rebinds(worlds, tiny_spec(mesh, dropout=0.1, **model), rebuild=rebuild)


@pytest.mark.slow
def test_a_collective_of_any_axis_fails_after_the_configured_timeout(worlds: Worlds) -> None:
    limit_s = 1.0
    detection = DetectionSpec(collective_timeout_s=limit_s)
    spec = tiny_spec(FULL).model_copy(update={"detection": detection})
    waited = worlds.run(programs.waits_for_absent_peer, spec)
    assert all(wait_s >= limit_s for rank in (0, 2) for wait_s in waited[rank])


@pytest.mark.seconds
@pytest.mark.parametrize("per_block", [False, True], ids=["one group", "a group per block"])
@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate"])
def test_gradients_of_a_broken_backward_pass_do_not_reach_the_next(
    worlds: Worlds, axis: str, per_block: bool
) -> None:
    # A regression in torch: FSDP2's reset keeps unsharded gradients of the interrupted pass.
    spec = tiny_spec({axis: 2}, dropout=0.1)
    whole = programs.undisturbed_per_block if per_block else programs.undisturbed
    expected = worlds.run(whole, spec)[0]["digests"]
    for digests in worlds.run(programs.interrupted_in_backward, spec, 4, per_block):
        assert digests == expected


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [FULL, soak({"dp_shard": 4}), {"tp": 2}, soak(REPLICAS)], ids=str)
def test_tied_embeddings_follow_the_curve_of_one_process_on_every_mesh(
    worlds: Worlds, mesh: dict[str, int]
) -> None:
    alone = rows_of(worlds, tiny_spec({}, tied_embeddings=True))
    assert alone[-1].loss != rows_of(worlds, tiny_spec({}))[-1].loss
    assert_same_curve(alone, rows_of(worlds, tiny_spec(mesh, tied_embeddings=True)))


@pytest.mark.seconds
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("mesh", MESHES_WITH_TP, ids=str)
def test_a_divided_vocabulary_follows_the_curve_of_one_process(
    worlds: Worlds, mesh: dict[str, int], tied: bool
) -> None:
    spec = tiny_spec({**mesh, "vocabulary_parallel": True}, tied_embeddings=tied)
    assert_one_curve(worlds, tiny_spec({}, tied_embeddings=tied), spec)


@pytest.mark.seconds
@pytest.mark.parametrize("vocabulary", [False, True], ids=["whole", "divided"])
@pytest.mark.parametrize("mesh", MESHES_WITH_TP, ids=str)
def test_a_divided_sequence_follows_the_curve_of_one_process(
    worlds: Worlds, mesh: dict[str, int], vocabulary: bool
) -> None:
    divided = {"sequence_parallel": True, "vocabulary_parallel": vocabulary}
    assert_one_curve(worlds, tiny_spec({}), tiny_spec({**mesh, **divided}))


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("mesh", "mode", "every"),
    [
        (FULL, "full", 1),
        (FULL, "selective", 1),
        slow(FULL, "full", 2),
        slow(FULL, "selective", 2),
        slow({**FULL, "sequence_parallel": True}, "selective", 1),
    ],
    ids=str,
)
def test_activation_checkpointing_changes_no_bit(
    worlds: Worlds, mesh: dict[str, Any], mode: str, every: int
) -> None:
    spec = tiny_spec(
        mesh, dropout=0.1, activation_checkpointing=mode, activation_checkpointing_every=every
    )
    assert digests_of(worlds, spec) == digests_of(worlds, tiny_spec(mesh, dropout=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_broken_backward_pass_that_computed_again_does_not_reach_the_next(
    worlds: Worlds, mode: str
) -> None:
    spec = tiny_spec({"dp_shard": 2}, dropout=0.1, activation_checkpointing=mode)
    expected = worlds.once(programs.undisturbed_per_block, spec)[0]["digests"]
    for digests in worlds.run(programs.interrupted_in_backward, spec, 4, True):
        assert digests == expected


@pytest.mark.seconds
@pytest.mark.parametrize("zero", [slow(1), soak(2), 3])
@pytest.mark.parametrize("mesh", [soak({"dp_shard": 4}), FULL, soak(REPLICAS)], ids=str)
def test_zero_follows_the_curve_and_survives_a_broken_backward_pass(
    worlds: Worlds, mesh: dict[str, int], zero: int
) -> None:
    spec = tiny_spec({**mesh, "zero": zero}, dropout=0.1)
    plain = rows_of(worlds, tiny_spec(mesh, dropout=0.1))
    for expected, found in zip(plain, rows_of(worlds, spec), strict=True):
        assert found.loss == pytest.approx(expected.loss, abs=1e-5)
    if spec.parallel.data_parallel == 2:  # two micro-batches each, as the program needs
        for digests in worlds.run(programs.interrupted_in_backward, spec, 4, False):
            assert digests == digests_of(worlds, spec)


@pytest.mark.slow
def test_zero_divides_gradients_and_parameters_during_a_step(worlds: Worlds) -> None:
    found = {}
    for zero in (1, 2, 3):
        spec = tiny_spec({"dp_shard": 2, "zero": zero}, steps=2)
        ranks = worlds.run(programs.whole_bytes_during_accumulation, spec)
        assert ranks[0] == ranks[1]
        found[zero] = ranks[0]
    (parameters, gradients), model = found[1], found[1][0]
    assert parameters == gradients == model > 0
    assert found[2] == (model, 0)
    assert found[3] == (0, 0)


@pytest.mark.slow
def test_a_large_models_groups_follow_the_same_curve(worlds: Worlds) -> None:
    alone = worlds.once(programs.undisturbed, tiny_spec({}))[0]["rows"]
    together = worlds.once(programs.undisturbed_per_block, tiny_spec(FULL))[0]["rows"]
    for single, many in zip(alone, together, strict=True):
        assert many.loss == pytest.approx(single.loss, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, FULL])
def test_low_precision_stays_near_the_curve(worlds: Worlds, mesh: dict[str, int]) -> None:
    exact = worlds.once(programs.undisturbed, tiny_spec({}))[0]["rows"]
    low = worlds.once(programs.undisturbed, tiny_spec(mesh, dtype="bfloat16"))[0]["rows"]
    for single, other in zip(exact, low, strict=True):
        assert other.loss == pytest.approx(single.loss, rel=2e-2)
        assert other.loss != single.loss


@pytest.mark.seconds
@pytest.mark.parametrize("mesh", [FULL, slow({"dp_shard": 2, "cp": 2})], ids=str)
def test_a_step_that_is_nonfinite_on_one_rank_is_applied_on_no_rank(
    worlds: Worlds, mesh: dict[str, int]
) -> None:
    stop = GuardsSpec(nonfinite=NonfiniteGuardSpec(policy="stop"))
    spec = tiny_spec(mesh).model_copy(update={"guards": stop})
    for message, unchanged, applied in worlds.run(programs.poisoned, spec, 3):
        assert message.startswith("nonfinite at step 3 (window 2): loss")
        assert message.endswith("began on rank 1 in the output of norm, micro-batch 0")
        assert unchanged
        assert applied == 2


@pytest.mark.seconds
def test_a_run_that_skips_a_window_equals_a_run_that_knew_it_in_advance(worlds: Worlds) -> None:
    spec = tiny_spec(FULL, steps=12, dropout=0.1, **FLAGS)
    knew = worlds.run(programs.undisturbed, spec, None, ((9, 10),))[0]
    poisoned = spec.model_copy(update={"recipe": "tests.support.ranks.recipes:PoisonedWindow"})
    for result in worlds.once(programs.undisturbed, poisoned):
        assert result["digests"] == knew["digests"]
        assert [row.samples for row in result["rows"]] == [row.samples for row in knew["rows"]]
        assert result["ledger"] == Ledger(((9, 10),))
        (trip,) = result["trips"]
        assert (trip.kind, trip.decision, trip.step) == ("nonfinite", "skip", 10)
        assert (trip.window, trip.skipped) == (9, (9, 10))
        assert (trip.ranks, trip.micro_batch) == ((2,), 1)
        assert (trip.layer, trip.what) == ("blocks.1.feed_forward.up", "output")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("phase", "checkpointing"),
    [
        ("forward", "none"),
        ("backward", "none"),
        ("agree", "none"),
        ("optimizer", "none"),
        ("backward", "full"),
        ("backward", "selective"),
    ],
)
def test_a_killed_rank_is_replaced_and_the_bits_are_the_same(
    worlds: Worlds, undisturbed: dict[str, Any], tmp_path: Path, phase: str, checkpointing: str
) -> None:
    spec = tiny_spec(FULL, dropout=0.1, activation_checkpointing=checkpointing)
    kill = (phase, STOP)
    assert_replaced(worlds, spec, tmp_path, undisturbed["digests"], programs.survivor, kill)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("replicas", "phase"),
    [(2, "backward"), (2, "sum"), (2, "agree"), (3, "sum")],
)
def test_a_killed_replica_is_replaced_and_survivors_keep_their_models(
    worlds: Worlds, tmp_path: Path, replicas: int, phase: str
) -> None:
    # With three, the bits of a sum depend on its place in the buffer.
    spec = tiny_spec({"dp_replicate": replicas}, dropout=0.1)
    expected = worlds.once(programs.undisturbed_per_block, spec)[0]["digests"]
    survivors = assert_replaced(
        *(worlds, spec, tmp_path, expected, programs.survivor_per_block, (phase, STOP)),
        resumed=programs.resumed_per_block,
    )
    assert all(result["same_tensors"] for result in survivors)
