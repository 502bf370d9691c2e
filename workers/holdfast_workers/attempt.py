"""One worker's part in one attempt: rendezvous, model, state, training, checkpoints.

The order of things: join the process groups under the attempt's own prefix, build the model (or
put the new groups under the living one), take the state named in the order, say `joined`, train.
A step is applied only after the world-wide agreement and only if the attempt is not fenced by
then. Everything said to the agent carries the attempt.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from holdfast_workers import control, groups
from holdfast_workers.checkpoint.load import load_state
from holdfast_workers.checkpoint.manifest import CheckpointError
from holdfast_workers.copies import copy_path
from holdfast_workers.errors import WorkersError
from holdfast_workers.loop import DigestSource, train
from holdfast_workers.memory.segment import BadSegment, Commit, Segment, SegmentError
from holdfast_workers.memory.shadow import Copies, Patience
from holdfast_workers.messages import ErrorKind, StepRow, Tier
from holdfast_workers.recipes.base import World
from holdfast_workers.state import CopyStopped

if TYPE_CHECKING:
    from holdfast_workers.agreement import Agreed
    from holdfast_workers.chaos import FaultPoints
    from holdfast_workers.layout import StateLayout
    from holdfast_workers.recipes.base import Recipe
    from holdfast_workers.state import Snapshot

COPY_GRACE_S = 1.0
COPY_PIECE = 1 << 24


class Fenced(Exception):
    """The attempt is over: a newer one was announced."""


class RestoreFailed(Exception):
    """The state named in the order is not to be had; `detail` says which."""


class CannotMove(WorkersError):
    """A living process was given another place in the mesh than it was built for. torch keeps
    coordinates of the first one, and would cut the model where the process stood before."""


class Link(Protocol):
    """What an attempt asks of the worker's control link."""

    def send(self, message: dict[str, Any]) -> None: ...
    def is_fenced(self, attempt: int) -> bool: ...
    def wait_replicated(self, attempt: int, step: int, timeout_s: float) -> int: ...
    def wait_state(self, attempt: int, timeout_s: float) -> dict[str, Any]: ...


class Attempt:
    """Runs one join order to its end; implements the hooks of the training loop."""

    def __init__(
        self,
        order: dict[str, Any],
        config: dict[str, Any],
        recipe: Recipe,
        link: Link,
        faults: FaultPoints,
        built_for: World | None,
    ) -> None:
        self.built_for = built_for  # the world that the recipe's living model stands on
        self._order = order
        self._config = config
        self._recipe = recipe
        self._link = link
        self._faults = faults
        self._number: int = order["attempt"]
        self._rank: int = order["rank"]
        self._spec = recipe.spec
        self._segment: Segment | None = None
        self._memory_step = -1  # newest step committed to memory
        self._step = 0
        self._start_digest: str | None = None
        self._copies = Copies()
        self._patience = Patience(config["replication_patience_s"], config["replication_share"])
        self._waited_s = 0.0  # by the training thread for checkpoints, in this step
        self._phases: dict[str, float] = {}
        faults.rank = self._rank

    def run(self) -> None:
        """Join, restore and train to the last step. Raises whatever ended it before."""
        self._faults.reach("forming")
        world = self._join()
        self._enter(world)
        start = self._restore()
        self._say("joined", step=start, phases_s=self._phases, tier=self._order["restore"]["tier"])
        self._step = start
        if start == self._spec.train.steps:  # the fault came between the last step and its save
            self._leave_for_saver(start, self._recipe.freeze(start).write)
        train(self._recipe, world, self._spec, self, start, self._start_digest)
        self._copies.finish()
        groups.leave()
        self._say("done", step=self._spec.train.steps)

    def failure(self, error: Exception) -> dict[str, Any]:
        """What the agent is told of an exception that no fence explains."""
        return {
            "op": "failed",
            "attempt": self._number,
            "rank": self._rank,
            "step": self._step,
            "kind": _kind(error),
            "type": type(error).__name__,
            "message": control.shortened(str(error)),
            "traceback": control.shortened("".join(traceback.format_exception(error))),
        }

    def abandon(self) -> None:
        """Drop the half-done step and the groups; the process stays warm.

        A copy under way is made whole if that takes no time: the step it is of need not be lost.
        """
        self._copies.end(COPY_GRACE_S)
        self._recipe.abandon_step()
        groups.leave()
        self._close_segment()

    # --- hooks of the training loop -------------------------------------------------------------

    def phase(self, name: str, step: int) -> None:
        self._faults.reach(name, step)

    def commit_gate(self, step: int) -> None:
        with self._waiting():
            self._copies.await_captured()
        self._check_fence()

    def replicated_step(self) -> int:
        """What the partner holds. A little late, it is waited for; the next memory checkpoint is
        skipped otherwise."""
        with self._waiting():
            self._copies.await_captured()
            if self._memory_step < 0 or not self._order["has_partner"]:
                return self._memory_step
            began = time.monotonic()
            patience_s = self._patience.left_s if self._memory_due(self._step + 1) else 0.0
            step = self._link.wait_replicated(self._number, self._memory_step, patience_s)
            self._patience.spend(time.monotonic() - began)
            return step

    def checkpoint(self, step: int, recipe: Recipe, agreed: Agreed) -> DigestSource | None:
        """Begin to copy step `step` to memory when due, and for the remote tier when due.

        The copy is made in the shadow of the next forward and backward. The slot of the last but
        one checkpoint is overwritten only once the last one has reached every rank's partner:
        some step is always whole, whatever dies.
        """
        self._step = step
        to_memory = self._memory_due(step) and agreed.replicated_step >= self._memory_step
        to_remote = self._remote_due(step)
        if not (to_memory or to_remote):
            return None
        with self._waiting():
            snapshot = recipe.freeze(step)
            return self._copies.start(
                lambda captured: self._copy_out(snapshot, step, to_memory, to_remote, captured)
            )

    def committed(self, row: StepRow) -> None:
        if self._order["reporter"]:
            self._say("row", row=asdict(replace(row, checkpoint_wait_s=self._waited_s)))
        self._patience.earn(row.step_time_s)
        self._waited_s = 0.0

    def digest(self, step: int, digest: str) -> None:
        if self._order["reporter"]:
            self._say("digest", step=step, digest=digest)

    # --- joining --------------------------------------------------------------------------------

    def _join(self) -> World:
        order = self._order
        began = time.monotonic()
        groups.join(
            order["store_host"],
            order["store_port"],
            self._number,
            self._rank,
            order["world_size"],
            order["timeout_s"],
            order["device"],
        )
        self._phases["rendezvous"] = time.monotonic() - began
        self._faults.reach("rendezvous")
        self._check_fence()
        return World(
            rank=self._rank,
            world_size=order["world_size"],
            mesh=order["mesh"],
            attempt=self._number,
            device=order["device"],
        )

    def _enter(self, world: World) -> None:
        began = time.monotonic()
        if self.built_for is None:
            self._recipe.build(world)
        elif _same_place(self.built_for, world):
            self._recipe.rebind(world)
        else:
            raise CannotMove(
                f"a process of rank {self.built_for.rank} cannot take rank {world.rank}"
            )
        self.built_for = world
        self._phases["build"] = time.monotonic() - began
        self._check_fence()

    def _restore(self) -> int:
        began = time.monotonic()
        restore = self._order["restore"]
        tier, step = Tier(restore["tier"]), int(restore["step"])
        self._faults.reach("restore")
        if tier is Tier.INIT:
            self._recipe.initialize()
        elif tier is Tier.REMOTE:
            self._from_remote(Path(restore["uri"]), step)
        else:
            self._from_memory(restore)
        self._check_fence()
        if self._spec.checkpoint.memory.every_steps:
            self._ensure_in_memory(step)
        self._phases["restore"] = time.monotonic() - began
        return step

    def _from_memory(self, restore: dict[str, Any]) -> None:
        word = self._link.wait_state(self._number, self._order["timeout_s"])
        if not word["ok"]:
            raise RestoreFailed(word["message"])
        path = Path(self._order["segment_path"])
        try:
            segment = self._segment = Segment.open(path)
        except (SegmentError, FileNotFoundError) as error:
            raise RestoreFailed(str(error)) from error
        if segment.layout != self._recipe.layout():
            raise RestoreFailed(f"{path.name} has another layout than the model of this rank")
        for commit in segment.commits():
            if (commit.attempt, commit.step) == (restore["attempt"], restore["step"]):
                if not segment.verify(commit):
                    raise RestoreFailed(f"step {commit.step} in memory does not match its digest")
                self._recipe.read_state(segment.payload(commit))
                self._memory_step = commit.step
                self._start_digest = commit.digest
                return
        raise RestoreFailed(f"step {restore['step']} is not in this node's memory")

    def _from_remote(self, folder: Path, step: int) -> None:
        layout = self._recipe.layout()
        payload = memoryview(bytearray(layout.payload_bytes))
        self._recipe.initialize()  # what a checkpoint of another mesh does not hold
        self._recipe.write_state(payload, step)
        try:
            load_state(folder, layout, payload, mesh=self._order["mesh"], rank=self._rank)
        except CheckpointError as error:
            raise RestoreFailed(str(error)) from error
        self._recipe.read_state(payload)

    def _ensure_in_memory(self, step: int) -> None:
        """Whatever tier the state came from: from now on memory has it."""
        if self._memory_step != step:
            self._start_digest = self._write_memory(self._recipe.freeze(step), step).digest

    def _check_fence(self) -> None:
        if self._link.is_fenced(self._number):
            raise Fenced(self._number)

    # --- checkpoints ----------------------------------------------------------------------------

    def _memory_due(self, step: int) -> bool:
        every = self._spec.checkpoint.memory.every_steps
        return every > 0 and step % every == 0

    def _remote_due(self, step: int) -> bool:
        every = self._spec.checkpoint.remote.every_steps
        return step == self._spec.train.steps or (every > 0 and step % every == 0)

    def _copy_out(
        self,
        snapshot: Snapshot,
        step: int,
        to_memory: bool,
        to_remote: bool,
        captured: Callable[[str], None],
    ) -> None:
        """In the copying thread: `captured` is called once the live state may change again."""
        if not to_memory:
            captured(self._leave_for_saver(step, partial(snapshot.write, stopped=self._stopped)))
            return
        commit = self._write_memory(snapshot, step)
        captured(commit.digest)
        if to_remote:
            payload = self._open_segment().payload(commit)
            self._leave_for_saver(step, lambda view: self._copied(payload, view, commit.digest))

    def _copied(self, source: memoryview, target: memoryview, digest: str) -> str:
        into, of = (np.frombuffer(one, dtype=np.uint8) for one in (target, source))
        for start in range(0, of.nbytes, COPY_PIECE):
            if self._stopped():
                raise CopyStopped
            into[start : start + COPY_PIECE] = of[start : start + COPY_PIECE]
        return digest

    def _stopped(self) -> bool:
        return self._copies.stopped

    def _write_memory(self, snapshot: Snapshot, step: int) -> Commit:
        segment = self._open_segment()
        digest = snapshot.write(segment.begin(step), self._stopped)
        self._faults.reach("memory", step)
        commit = segment.commit(attempt=self._number, step=step, digest=digest)
        self._memory_step = step
        self._say("committed", step=step)
        self._faults.reach("committed", step)
        return commit

    def _leave_for_saver(self, step: int, write: Callable[[memoryview], str]) -> str:
        """Leave a copy of the state, which `write` makes, for the saver; its digest."""
        self._faults.reach("save", step)
        root = Path(self._order["segment_root"])
        path = copy_path(root, self._rank, step, self._number)
        path.unlink(missing_ok=True)
        with Segment.create(path, self._recipe.layout()) as copy:
            digest = write(copy.begin(step))
            copy.commit(attempt=self._number, step=step, digest=digest)
        self._say("save", step=step, path=str(path))
        self._faults.reach("saved", step)
        return digest

    def _open_segment(self) -> Segment:
        """This rank's own segment: the one at hand if its layout fits, else a new one."""
        if self._segment is None:
            path = Path(self._order["segment_path"])
            layout = self._recipe.layout()
            self._segment = _opened(path, layout) or Segment.create(path, layout)
        return self._segment

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """What the training thread spends in here is what checkpoints cost it."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - began

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _say(self, op: str, **fields: Any) -> None:
        self._link.send({"op": op, "attempt": self._number, "rank": self._rank, **fields})


def _opened(path: Path, layout: StateLayout) -> Segment | None:
    """The segment at `path`, if it is one and of this layout; freed if it is not."""
    try:
        segment = Segment.open(path, writable=True)
    except FileNotFoundError:
        return None
    except BadSegment:
        path.unlink()
        return None
    if segment.layout == layout:
        return segment
    segment.close()
    path.unlink()
    return None


def _same_place(before: World, after: World) -> bool:
    return (before.rank, before.mesh, before.device) == (after.rank, after.mesh, after.device)


def _kind(error: Exception) -> str:
    if isinstance(error, RestoreFailed):
        return ErrorKind.RESTORE
    if groups.is_communication_error(error):
        return ErrorKind.COMMUNICATION
    return ErrorKind.INTERNAL if isinstance(error, WorkersError) else ErrorKind.USER
