"""A restarted Trainer resumes the newest checkpoint that a killed rank has not left unfinished."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.integrations.trainer_folders import STATE_FILE, newest_whole

RANKS = 2
OF_RANKS = [f"rng_state_{rank}.pth" for rank in range(RANKS)]
FILES = st.sets(st.sampled_from([STATE_FILE, "model.safetensors", *OF_RANKS]))


@given(st.dictionaries(st.integers(1, 10**6), FILES, max_size=6))
def test_the_newest_whole_checkpoint_is_chosen(checkpoints: dict[int, set[str]]) -> None:
    named = {f"checkpoint-{step}": files for step, files in checkpoints.items()}
    begun = {step: files for step, files in checkpoints.items() if STATE_FILE in files}
    whole = [step for step, files in begun.items() if files.issuperset(OF_RANKS)]
    expected = max(whole or begun, default=None)
    chosen = newest_whole(named, RANKS)
    assert chosen == (None if expected is None else f"checkpoint-{expected}")


def test_a_world_that_has_grown_resumes_what_fewer_ranks_saved() -> None:
    files = [STATE_FILE, *OF_RANKS]
    assert newest_whole({"checkpoint-5": files, "checkpoint-10": files}, 4) == "checkpoint-10"


def test_a_single_process_has_one_random_state_and_other_folders_are_ignored() -> None:
    whole, torn = [STATE_FILE, "rng_state.pth"], ["rng_state.pth"]
    names = {"checkpoint-5": whole, "checkpoint-10": torn, "checkpoint-best": whole}
    assert newest_whole(names, 1) == "checkpoint-5"
