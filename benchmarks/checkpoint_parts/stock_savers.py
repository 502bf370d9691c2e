"""The same recipe and step loop, saved at every step by PyTorch's own savers.

    torchrun -m benchmarks.checkpoint_parts.stock_savers JOB.yaml SAVER FOLDER OUT.jsonl

`none` saves nothing; `torch_save` writes synchronously; `dcp_default` is `async_save` with its
default settings; `dcp_best` saves from another process and stages in another thread, and waits for
the staging before the state changes. All write to FOLDER, which should be in memory. Rank 0 writes
a line per step: its time, how long a save blocked the training thread, and the number of saves so
far. A save that would wait for the previous one is skipped, as Holdfast does.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed.checkpoint as dcp
from tests.support.ranks.rank_worlds import RecordingHooks
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.recipes.big_state import BigState
from holdfast_workers.parallelize import process_groups
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.standalone import load_spec
from holdfast_workers.training.recipe import Recipe, World
from holdfast_workers.training.step_agreement import Agreed
from holdfast_workers.training.step_loop import DigestSource, train

KEPT = 2
COLLECTIVE_S = 60.0


def main() -> None:
    job, saver, folder, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    spec = load_spec(job, steps=None, world_size=size)
    recipe = BigState(spec, folder)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    process_groups.join(address, port, 0, rank, size, COLLECTIVE_S, "cpu")
    recipe.build(world := World(rank, size, spec.parallel.mesh, attempt=0, device="cpu"))
    recipe.initialize()
    with open(out if rank == 0 else os.devnull, "w") as lines:  # noqa: PTH123
        hooks = _SavingHooks(saver, recipe, rank, folder, lines)
        train(recipe, world, spec, hooks, 0)
        hooks.finish()
    process_groups.leave()


class _SavingHooks(RecordingHooks):
    """Hooks that save after every step."""

    def __init__(self, saver: str, recipe: BigState, rank: int, folder: Path, out: TextIO) -> None:
        super().__init__()
        self._save: Callable[[int], None] = getattr(self, f"_{saver}")
        self._recipe = recipe
        self._rank = rank
        self._folder = folder
        self._out = out
        # A separate group: a save in another thread would interleave with training's collectives
        # in the default group and hang occasionally.
        self._group = torch.distributed.new_group(backend="gloo")
        self._idle_group = torch.distributed.new_group(backend="gloo")
        self._stall_s = 0.0
        self._saves = 0
        self._last: Path | None = None
        self._saving: Future[Any] | None = None
        self._staging: Future[Any] | None = None
        self._stager = (
            DefaultStager(StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False))
            if saver == "dcp_best"
            else None
        )

    def commit_gate(self, step: int) -> None:
        if self._staging is not None:
            began = time.monotonic()
            self._staging.result()
            self._stall_s += time.monotonic() - began

    def checkpoint(
        self, step: int, recipe: Recipe, agreed: Agreed, last: bool
    ) -> DigestSource | None:
        if self._is_due(step):
            began = time.monotonic()
            self._save(step)
            self._stall_s += time.monotonic() - began
            self._saves += 1
            if self._rank == 0 and self._last is not None:
                shutil.rmtree(self._last, ignore_errors=True)
            self._last = self._path_of(step)
        return None

    def committed(self, row: StepRow) -> None:
        self._out.write(json.dumps([row.step_time_s, self._stall_s, self._saves]) + "\n")
        self._out.flush()
        self._stall_s = 0.0

    def finish(self) -> None:
        if self._saving is not None:
            self._saving.result()
        if self._stager is not None:
            self._stager.close()

    def _state(self) -> dict[str, torch.Tensor]:
        return {f"{self._rank}.{i}": tensor for i, tensor in enumerate(self._recipe.tensors)}

    def _none(self, step: int) -> None:
        pass

    def _torch_save(self, step: int) -> None:
        torch.save(self._state(), self._folder / f"rank-{self._rank}-{step % KEPT}.pt")

    def _dcp_default(self, step: int) -> None:
        self._saving = dcp.async_save(
            self._state(), checkpoint_id=self._path_of(step), process_group=self._group
        )  # type: ignore[assignment]

    def _dcp_best(self, step: int) -> None:
        response: Any = dcp.async_save(
            self._state(),
            checkpoint_id=self._path_of(step),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        self._staging = getattr(response, "staging_completion", None)
        self._saving = getattr(response, "upload_completion", response)

    def _is_due(self, step: int) -> bool:
        """False while a save is running on any rank, because the new one would only wait for it.
        The previous files are removed here, outside the measured time."""
        if self._save == self._none:
            return False
        idle = torch.tensor(int(self._saving is None or self._saving.done()))
        torch.distributed.all_reduce(idle, torch.distributed.ReduceOp.MIN, group=self._idle_group)
        if idle and self._rank == 0:
            shutil.rmtree(self._path_of(step), ignore_errors=True)
        torch.distributed.barrier(group=self._idle_group)
        return bool(idle)

    def _path_of(self, step: int) -> Path:
        return self._folder / f"step-{step}"


if __name__ == "__main__":
    main()
