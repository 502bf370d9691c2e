"""The calls of `ray.train` in one rank, with everything around it played by the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from ray.train import Checkpoint

from holdfast.integrations.ray_train.memory_checkpoints import MemoryCheckpoints
from holdfast.integrations.ray_train.rank_place import WorldPlace
from holdfast.integrations.ray_train.run_folder import Retention, RunFolder
from holdfast.integrations.ray_train.train_calls import TrainCalls


class OneRank:
    """Its group, its attachment and its shards of datasets."""

    rank = 0
    should_stop = False
    positions: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.shown: list[int] = []

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def from_rank_zero(self, value: Any) -> Any:
        return value

    def step(self, step: int, **_: Any) -> None:
        self.shown.append(step)


class Memory(MemoryCheckpoints):
    """Notes which steps had been shown as each checkpoint was saved."""

    def __init__(self, rank: OneRank) -> None:
        self.rank = rank
        self.shown_before: dict[int, list[int]] = {}

    def save(self, index: int, part: Path | None) -> None:
        self.shown_before[index] = [*self.rank.shown]


def test_a_step_is_shown_before_it_is_saved(tmp_path: Path) -> None:
    """A rank that is killed between the two computes the step again, and shows it again. In the
    other order nobody would ever show it."""
    rank: Any = OneRank()
    memory = Memory(rank)
    folder = RunFolder(tmp_path / "run", 1, Retention())
    folder.open()
    place = WorldPlace(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0)
    calls = TrainCalls(place, "run", rank, rank, folder, memory, rank)
    part = tmp_path / "part"
    part.mkdir()
    for loss in (0.5, 0.25):
        calls.report({"loss": loss}, checkpoint=Checkpoint(str(part)))
    assert memory.shown_before == {1: [1], 2: [1, 2]}
