"""Which checkpoint folder of a Transformers Trainer is whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

FOLDER_PREFIX = "checkpoint-"
STATE_FILE = "trainer_state.json"
"""The last file of a checkpoint that rank 0 writes."""


def newest_whole(checkpoints: Mapping[str, Iterable[str]], world_size: int) -> str | None:
    """The name of the checkpoint to resume. `checkpoints`: name -> names of its files.

    A rank that is killed may leave a checkpoint without its last files. One that lacks a rank's
    random state is chosen only if all do: it was saved by fewer ranks.
    """
    wanted = {"rng_state.pth"}
    if world_size > 1:
        wanted = {f"rng_state_{rank}.pth" for rank in range(world_size)}
    whole: list[tuple[bool, int, str]] = []
    for name, files in checkpoints.items():
        step = name.removeprefix(FOLDER_PREFIX)
        present = set(files)
        if step.isdecimal() and STATE_FILE in present:
            whole.append((wanted <= present, int(step), name))
    return max(whole)[-1] if whole else None
