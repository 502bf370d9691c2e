"""Memory checkpoints of users' programs, in real worlds of two and more ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.programs import tier_programs
from tests.support.programs.tier_worlds import TierWorlds, from_memory

from holdfast_workers.memory.segment import Segment
from holdfast_workers.state.digest import payload_digest


@pytest.fixture
def worlds(tmp_path: Path) -> TierWorlds:
    return TierWorlds(tmp_path)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_new_process_continues_with_the_same_losses(worlds: TierWorlds, kind: str) -> None:
    whole = worlds.run(tier_programs.train_and_save, 2, kind, 3, 6)
    assert [side.saved for side in worlds.sides] == [[3], [3]]
    rest = worlds.run(
        tier_programs.restore_and_train, 2, kind, 6, attempt=2, restore=from_memory(3)
    )
    assert rest == whole
    assert [side.taken for side in worlds.sides] == [[3], [3]]


@pytest.mark.slow
def test_a_checkpoint_is_written_while_training_goes_on(worlds: TierWorlds) -> None:
    whole = worlds.run(tier_programs.save_beside_training, 2, "fsdp2", 3, 30)
    rest = worlds.run(
        tier_programs.restore_and_train, 2, "fsdp2", 30, attempt=2, restore=from_memory(3)
    )
    assert rest == whole


@pytest.mark.seconds
def test_the_same_program_runs_outside_of_holdfast(worlds: TierWorlds) -> None:
    assert worlds.run(tier_programs.save_beside_training_outside, 2, 10) == [False, False]
    assert not worlds.segment(0).exists()


@pytest.mark.seconds
@pytest.mark.parametrize(("point", "killed_rank"), [("write", 0), ("write", 1), ("commit", 0)])
def test_a_rank_that_is_killed_while_it_saves_leaves_the_last_step(
    worlds: TierWorlds, point: str, killed_rank: int
) -> None:
    arguments = (tier_programs.save_grid, 2, [10, 20, 30], point, killed_rank)
    with worlds.started(*arguments) as ranks:
        with pytest.raises((ChildProcessError, EOFError)):
            ranks[killed_rank].result()
        ranks[1 - killed_rank].process.kill()
    assert worlds.steps(killed_rank) == [20]
    worlds.run(tier_programs.load_grid, 2, 20, attempt=2, restore=from_memory(20))


def test_a_save_that_fails_on_one_rank_is_kept_on_none(worlds: TierWorlds) -> None:
    first, second = worlds.run(tier_programs.save_what_one_cannot, 2)
    assert second.startswith("TypeError: cannot pickle '_thread.lock'")
    assert first == f"PeerFailed: rank 1: {second}"


def test_a_load_of_different_steps_is_refused_on_all_ranks(worlds: TierWorlds) -> None:
    for error in worlds.run(tier_programs.load_different_steps, 2):
        assert "10 by rank 0, 20 by rank 1. All ranks must name the same one" in error


@pytest.mark.seconds
def test_a_flipped_byte_is_found(worlds: TierWorlds) -> None:
    worlds.run(tier_programs.save_grid, 2, [10], "", -1)
    with Segment.open(worlds.segment(1)) as segment:
        (commit,) = segment.commits()
        segment._slot(commit.slot)[100] ^= 1
    arguments = (tier_programs.load_grid, 2, 10)
    with (
        worlds.started(*arguments, attempt=2, restore=from_memory(10)) as ranks,
        pytest.raises(AssertionError, match="does not match its digest"),
    ):
        ranks[1].result()
    assert worlds.steps(1) == []


@pytest.mark.seconds
@pytest.mark.parametrize("world_size", [1, 3])
def test_another_world_size_loads_what_is_at_hand(worlds: TierWorlds, world_size: int) -> None:
    worlds.run(tier_programs.save_grid, 2, [10], "", -1, one_node=True)
    worlds.run(
        tier_programs.load_grid,
        world_size,
        10,
        attempt=2,
        restore=from_memory(10),
        one_node=True,
    )


@pytest.mark.seconds
def test_an_index_of_any_length_fits_beside_the_metadata(worlds: TierWorlds) -> None:
    steps = [10**digits for digits in range(14, 19)]
    assert worlds.run(tier_programs.save_with_little_room, 1, steps) == [steps]


def test_ranks_that_save_alone_get_their_own_state_back(worlds: TierWorlds) -> None:
    worlds.run(tier_programs.save_alone, 2)
    worlds.run(tier_programs.load_alone, 2, attempt=2, restore=from_memory(10))


def test_a_save_that_begins_before_the_last_one_is_complete_damages_nothing(
    worlds: TierWorlds,
) -> None:
    assert worlds.run(tier_programs.save_too_early, 1) == [[0]]
    with Segment.open(worlds.segment(0, 1)) as segment:
        assert [segment.verify(commit) for commit in segment.commits()] == [True]


def test_a_process_group_of_some_ranks_is_refused(worlds: TierWorlds) -> None:
    worlds.run(tier_programs.save_on_some_ranks, 3)


def test_a_save_is_skipped_on_all_ranks_while_the_partners_of_one_lag_behind(
    worlds: TierWorlds,
) -> None:
    kept = worlds.run(tier_programs.save_objects, 2, [1, 2, 3], late=[1])
    assert kept == [[True, True, False]] * 2
    assert [worlds.steps(rank) for rank in (0, 1)] == [[1, 2]] * 2


@pytest.mark.seconds
def test_the_save_of_a_program_that_is_to_stop_waits_for_its_partners(worlds: TierWorlds) -> None:
    (took_s,) = worlds.run(tier_programs.timed_save, 1, delay_s=0.4, stop_wanted=True)
    assert took_s >= 0.4
    worlds.run(tier_programs.timed_save, 1, late=[0], attempt=2)  # it would wait for an hour


def test_objects_come_back_on_their_rank_or_on_all(worlds: TierWorlds) -> None:
    worlds.run(tier_programs.save_objects, 2, [1, 2, 3])
    own = worlds.run(tier_programs.load_objects, 2, None, attempt=2, restore=from_memory(3))
    assert own == [(3, [[3.0] * 3]), (3, [[3.0] * 3] * 2)]
    of_one = worlds.run(tier_programs.load_objects, 2, 1, attempt=2, restore=from_memory(2))
    assert of_one == [(2, [[2.0] * 3] * 2)] * 2


def test_nothing_is_loaded_at_the_beginning_of_a_job(worlds: TierWorlds) -> None:
    assert worlds.run(tier_programs.load_objects, 2, None) == [None, None]


def test_a_larger_checkpoint_gets_a_larger_segment_which_keeps_the_last_step(
    worlds: TierWorlds,
) -> None:
    kept = worlds.run(tier_programs.save_sizes, 1, [1000, 2000, 3_000_000])
    assert kept == [[True, True, True]]
    assert worlds.steps(0, 1) == [2, 3]
    with Segment.open(worlds.segment(0, 1)) as segment:
        assert all(segment.verify(commit) for commit in segment.commits())
    assert [path.name for path in worlds.segment(0, 1).parent.glob("*larger*")] == []


@pytest.mark.parametrize("one_node", [False, True])
def test_every_rank_has_the_files_of_all_ranks(
    worlds: TierWorlds, tmp_path: Path, one_node: bool
) -> None:
    files = save_files(worlds, tmp_path, one_node)
    found = worlds.run(
        tier_programs.load_files,
        2,
        str(tmp_path),
        attempt=2,
        restore=from_memory(5),
        one_node=one_node,
    )
    assert found == [files, files]


def test_a_folder_that_ranks_of_a_node_share_is_written_once(
    worlds: TierWorlds, tmp_path: Path
) -> None:
    files = save_files(worlds, tmp_path, one_node=True)
    found = worlds.run(
        tier_programs.load_shared_files,
        2,
        str(tmp_path),
        attempt=2,
        restore=from_memory(5),
        one_node=True,
    )
    assert [digests for _, digests in found] == [files, files]
    assert [bool(pieces) for pieces, _ in found] == [True, False]


def test_a_rank_that_has_no_room_for_the_files_keeps_no_other_waiting(
    worlds: TierWorlds, tmp_path: Path
) -> None:
    save_files(worlds, tmp_path, one_node=False)
    again: dict[str, Any] = {"attempt": 2, "restore": from_memory(5)}
    found = worlds.run(tier_programs.load_files_without_room, 2, str(tmp_path), **again)
    assert [error for error, _ in found] == ["BadFolder", "PeerFailed"]
    assert not any("partial" in name for _, names in found for name in names)
    assert worlds.run(tier_programs.take_report_without_room, 2, **again) == [False, False]


def save_files(worlds: TierWorlds, folder: Path, one_node: bool) -> dict[str, str]:
    """Save files of two ranks; returns the digests of those that all ranks have then."""
    content = bytes(range(256)) * 1024
    for rank in (0, 1):
        own = folder / f"from-{rank}"
        (own / "deep" / "er").mkdir(parents=True)
        (own / f"state-{rank}.bin").write_bytes(content[rank:])
        (own / "deep" / "er" / "empty").write_bytes(b"")
        (own / "both").write_text(str(rank))
    worlds.run(tier_programs.save_files, 2, str(folder), True, one_node=one_node)
    return {
        "state-0.bin": payload_digest(content),
        "state-1.bin": payload_digest(content[1:]),
        "deep/er/empty": payload_digest(b""),
        "both": payload_digest(b"0"),
    }


def test_a_state_that_did_not_arrive_is_an_error(worlds: TierWorlds) -> None:
    with pytest.raises(AssertionError, match="cannot be restored from memory: no such node"):
        worlds.run(
            tier_programs.load_objects, 1, None, restore=from_memory(3), problem="no such node"
        )
