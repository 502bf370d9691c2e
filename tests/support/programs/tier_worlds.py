"""Worlds of ranks that keep memory checkpoints: real processes, each with a launcher's side."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.support.programs.launcher_side import NOTHING, LauncherSide, on_one_node, place_in
from tests.support.ranks.rank_worlds import Rank
from torch._C._distributed_c10d import TCPStore

from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.protocol.messages import Restore, Tier
from holdfast_workers.protocol.programs import SOCKET_VARIABLE

TIMEOUT_S = 60.0


def from_memory(step: int, attempt: int = 1) -> Restore:
    return Restore(Tier.OWN_RAM, step, attempt)


class TierWorlds:
    """The nodes' shared memory is a folder. `sides`: the launchers of the last world."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sides: list[LauncherSide] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.programs.tier_programs"])

    def run(
        self, program: Callable[..., Any], world_size: int, *extra: Any, **of: Any
    ) -> list[Any]:
        """The results of `program(rank, *extra)`, by rank."""
        with self.started(program, world_size, *extra, **of) as ranks:
            return [rank.result() for rank in ranks]

    @contextmanager
    def started(
        self,
        program: Callable[..., Any],
        world_size: int,
        *extra: Any,
        attempt: int = 1,
        restore: Restore = NOTHING,
        one_node: bool = False,
        late: Sequence[int] = (),
        problem: str = "",
        delay_s: float = 0.0,
        stop_wanted: bool = False,
    ) -> Iterator[list[Rank]]:
        """`late`: ranks whose partners hold nothing; `delay_s`: how late the others' partners are;
        `one_node`: all segments are on one node."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with contextlib.ExitStack() as stack:
            self.sides = []
            for rank in range(world_size):
                place = place_in(self.folder, rank, world_size, attempt, restore)
                place = on_one_node(place) if one_node else place
                side = LauncherSide(
                    replace(place, stop_wanted=stop_wanted),
                    replicates=rank not in late,
                    problem=problem,
                    delay_s=delay_s,
                )
                self.sides.append(stack.enter_context(side))
            ranks = [
                self._start(program, rank, world_size, store.port, extra)
                for rank in range(world_size)
            ]
            try:
                yield ranks
            finally:
                for started in ranks:
                    started.process.kill()
                    started.process.join(TIMEOUT_S)

    def commits(self, rank: int, world_size: int = 2) -> list[Commit]:
        with Segment.open(self.segment(rank, world_size), writable=False) as segment:
            return segment.commits()

    def steps(self, rank: int, world_size: int = 2) -> list[int]:
        return sorted(commit.step for commit in self.commits(rank, world_size))

    def segment(self, rank: int, world_size: int = 2) -> Path:
        return self.folder / f"node-{rank}" / f"world={world_size}" / f"own-{rank}.seg"

    def _start(
        self,
        program: Callable[..., Any],
        rank: int,
        world_size: int,
        port: int,
        extra: tuple[Any, ...],
    ) -> Rank:
        ours, theirs = self._context.Pipe(duplex=False)
        name = self.sides[rank].socket_name
        arguments = (theirs, program, rank, world_size, port, name, extra)
        process = self._context.Process(target=_rank_main, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return Rank(process, ours)


def _rank_main(
    results: Connection,
    program: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    socket_name: str,
    extra: tuple[Any, ...],
) -> None:
    os.environ[SOCKET_VARIABLE] = socket_name
    try:
        timeout = timedelta(seconds=TIMEOUT_S)
        store = TCPStore("127.0.0.1", port, timeout=timeout)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        results.send((True, program(rank, *extra)))
        dist.barrier()
    except BaseException:
        results.send((False, traceback.format_exc()))
    results.close()
    os._exit(0)  # threads of a broken process group must not keep the process
