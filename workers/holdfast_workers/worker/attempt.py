"""One worker's part in one attempt: rendezvous, model, state, training, checkpoints.

The order of things: join the process groups under the attempt's own prefix, build the model (or
put the new groups under the living one), take the state named in the order, say `joined`, train.
A step is applied only after the world-wide agreement and only if the attempt is not fenced by
then. Everything said to the agent carries the attempt.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from holdfast_workers.checkpoint.load import load_whole_state
from holdfast_workers.checkpoint.manifest import BadCheckpoint, CheckpointError
from holdfast_workers.checkpoint.retention import quarantine
from holdfast_workers.checkpoint.storage import StorageError, StorageOptions, open_storage
from holdfast_workers.errors import WorkersError
from holdfast_workers.fault_injection.failing_storage import failing_as_told
from holdfast_workers.ipc import control_channel
from holdfast_workers.memory.background_copy import Patience
from holdfast_workers.memory.segment import Segment, SegmentError
from holdfast_workers.parallelize import process_groups
from holdfast_workers.protocol.messages import ErrorKind, StepRow, Tier
from holdfast_workers.state.replicas import CorruptionFound
from holdfast_workers.training.guard_memory import OtherHistory
from holdfast_workers.training.guards import Decision
from holdfast_workers.training.rank_log import RankLog
from holdfast_workers.training.recipe import GuardTripped, NonFiniteStep, World
from holdfast_workers.training.skipped_windows import Ledger
from holdfast_workers.training.step_loop import DigestSource, Steps
from holdfast_workers.worker.initial_state import begin
from holdfast_workers.worker.rank_checkpoints import RankCheckpoints

if TYPE_CHECKING:
    from holdfast_workers.fault_injection.fault_points import FaultPoints
    from holdfast_workers.progress.beacon import Beacon
    from holdfast_workers.training.recipe import Recipe
    from holdfast_workers.training.step_agreement import Agreed

COPY_GRACE_S = 1.0
HOLD = "hold"
"""The phase of a rank that no supervisor is heard to let go on."""
COLD_STEPS = 3
"""The first steps of an attempt touch memory for the first time, and may compile."""
RESTORE_ATTEMPTS = 1000


_RESTORE_PHASES = {Tier.OWN_RAM: "restore", Tier.PARTNER_RAM: "restore_partner"}
"""How long a restore takes is learned for each of these; from elsewhere, apart from them."""


class Fenced(Exception):
    """The attempt is over: a newer one was announced."""


class RestoreFailed(Exception):
    """The state named in the order is not to be had."""


class StateDamaged(RestoreFailed):
    """It is there, and is not what was saved. Nobody is to try it again."""


class CannotMove(WorkersError):
    """A living process was given another place in the mesh than it was built for. torch keeps
    coordinates of the first one, and would cut the model where the process stood before."""


class Link(Protocol):
    """What an attempt asks of the worker's control link."""

    def send(self, message: dict[str, Any]) -> None: ...
    def is_fenced(self, attempt: int) -> bool: ...
    def wait_replicated(self, attempt: int, step: int, timeout_s: float) -> int: ...
    def wait_state(self, attempt: int, timeout_s: float) -> dict[str, Any]: ...
    def is_to_finish(self, attempt: int) -> bool: ...
    def has_lease(self, attempt: int) -> bool: ...
    def await_lease(self, attempt: int) -> None: ...
    def intervals(self, attempt: int) -> tuple[int, int] | None: ...


class Attempt:
    """Runs one join order to its end; implements the hooks of the training loop."""

    def __init__(
        self,
        order: dict[str, Any],
        config: dict[str, Any],
        recipe: Recipe,
        link: Link,
        faults: FaultPoints,
        beacon: Beacon,
        built_for: World | None,
    ) -> None:
        self.built_for = built_for  # the world that the recipe's living model stands on
        self._order = order
        self._config = config
        self._recipe = recipe
        self._link = link
        self._faults = faults
        self._beacon = beacon
        self._number: int = order["attempt"]
        self._rank: int = order["rank"]
        self._spec = recipe.spec
        self._arrived_step = -1  # newest step in memory that was seen to be at the partners
        self._step = 0
        self._cold_until = 0
        self._start_digest: str | None = None
        self._own = RankCheckpoints(order, recipe.layout, self._say, faults)
        self._log = RankLog(self._rank, self._number, order["mesh"], self._spec.train.steps)
        self._patience = Patience(config["replication_patience_s"], config["replication_share"])
        first = order["intervals"] or self._spec.checkpoint.first_intervals
        self._intervals: tuple[int, int] = (first[0], first[1])
        self._beside = (False, False)  # saved to memory, to remote: beside the present step
        self._waited_s = 0.0  # by the training thread for checkpoints, in this step
        self._all_waited_s = 0.0
        self._entered_at = 0.0
        self._phases: dict[str, float] = {}
        faults.rank = self._rank
        recipe.leave_if_over = self._check_fence

    def run(self) -> None:
        """Join, restore and train to the last step. Raises whatever ended it before."""
        self._faults.reach("forming")
        world = self._join()
        self._enter(world)
        last = self._recipe.run(lambda: self._begin_steps(world))
        self._beacon.enter("save", last)
        self._own.finish()
        process_groups.leave()
        self._log.done(last)
        self._say("done", step=last)

    def _begin_steps(self, world: World) -> Steps:
        """Once the recipe stands: the state goes in, and all others may know."""
        self._phases["build"] = time.monotonic() - self._entered_at
        self._check_fence()
        start = self._restore()
        tier = Tier(self._order["restore"]["tier"])
        self._say("joined", step=start, phases_s=self._phases, tier=tier)
        self._log.joined(start, tier, self._phases)
        self._step = start
        self._cold_until = start + COLD_STEPS
        if start == self._spec.train.steps:  # the fault came between the last step and its save
            self._own.leave_for_saver(start, self._recipe.freeze(start).write, {})
        return Steps(self._recipe, world, self._spec, self, start, self._start_digest)

    def fenced(self) -> None:
        """It was ended from outside: said to whoever reads this rank's log."""
        self._log.fenced(self._step)

    def failed(self, error: Exception) -> None:
        """Tell log and agent of an exception that no fence explains. The log first: what ends the
        job ends the process."""
        told: dict[str, Any] = {
            "step": self._step,
            "kind": _kind(error),
            "trip": error.report if isinstance(error, GuardTripped) else None,
            "finding": error.finding.data() if isinstance(error, CorruptionFound) else None,
            "type": type(error).__name__,
            "message": control_channel.shortened(str(error)),
            "traceback": control_channel.shortened("".join(traceback.format_exception(error))),
        }
        self._log.failed(self._step, told["kind"], told["type"], told["message"], told["traceback"])
        self._say("failed", **told)

    def abandon(self) -> None:
        """Drop the half-done step and the groups; the process stays warm.

        A copy under way is made whole if that takes no time: the step it is of need not be lost.
        """
        self._own.end(COPY_GRACE_S)
        self._recipe.abandon_step()
        process_groups.leave(keep=True)

    # --- hooks of the training loop -------------------------------------------------------------

    def phase(self, name: str, step: int, micro_batch: int = 0) -> None:
        self._beacon.cold = step <= self._cold_until
        self._beacon.enter(name, step, micro_batch)
        self._faults.reach(name, step, micro_batch)

    def blocked_s(self) -> float:
        return self._beacon.blocked_ns * 1e-9 + self._all_waited_s

    def commit_gate(self, step: int) -> None:
        with self._waiting():
            self._own.await_captured()
        if self._order["leased"]:
            self._hold()
        self._check_fence()

    def _hold(self) -> None:
        """Without a lease, wait for one: in a phase of its own, which is no standstill and may last
        for as long as it takes, so that nobody takes it for a hang, or learns from it."""
        if not self._link.has_lease(self._number):
            with self._beacon.within(HOLD, math.inf):
                self._link.await_lease(self._number)

    def replicated_step(self) -> int:
        """What all partners hold. A little late, they are waited for; the next memory checkpoint
        is skipped otherwise."""
        with self._waiting():
            self._own.await_captured()
            if self._own.memory_step < 0 or not self._own.is_held():
                return self._own.memory_step  # nothing to wait for
            began = time.monotonic()
            since_s = began - self._own.memory_at
            wanted = self._memory_due(self._step + 1)
            wait_s = self._patience.allowance_s(since_s) if wanted else 0.0
            step = self._link.wait_replicated(self._number, self._own.memory_step, wait_s)
            self._learn_from_waiting(since_s, time.monotonic() - began, step, wanted=wanted)
            return step

    def _learn_from_waiting(
        self, since_s: float, waited_s: float, step: int, *, wanted: bool
    ) -> None:
        """Once for each checkpoint that arrives, and where one is wanted that has not."""
        arrived = step >= self._own.memory_step
        if arrived and self._arrived_step < self._own.memory_step:
            self._arrived_step = self._own.memory_step
        elif arrived or not wanted:
            return
        self._patience.waited(since_s, waited_s, arrived=arrived)

    def stop_wanted(self) -> bool:
        return self._link.is_to_finish(self._number)

    def intervals(self) -> tuple[int, int]:
        return self._link.intervals(self._number) or self._intervals

    def checkpoint(
        self, step: int, recipe: Recipe, agreed: Agreed, last: bool
    ) -> DigestSource | None:
        """Begin to copy step `step` to memory when due, and for the remote tier when due.

        The copy is made in the shadow of the next forward and backward. The slot of the last but
        one checkpoint is overwritten only once the last one has reached every rank's partners:
        some step is always whole, whatever dies.
        """
        self._step = step
        self._intervals = agreed.intervals
        to_memory = self._memory_due(step) and agreed.replicated_step >= self._own.memory_step
        to_remote = last or self._remote_due(step)
        self._beside = (to_memory, self._own.are_being_saved() or to_remote)
        if to_remote:  # rare, and it takes longer: not to be measured by the other steps
            self._beacon.enter("save", step)
        if not (to_memory or to_remote):
            return None
        with self._waiting():
            snapshot = recipe.freeze(step)
            metrics = {"loss": agreed.loss, "grad_norm": agreed.grad_norm} if to_remote else None
            return self._own.start(snapshot, step, to_memory=to_memory, metrics=metrics, last=last)

    def committed(self, row: StepRow) -> None:
        if self._order["reporter"]:
            row = replace(
                row,
                checkpoint_wait_s=self._waited_s,
                memory_saved=self._beside[0],
                remote_saving=self._beside[1],
            )
            self._say("row", row=asdict(row))
        self._log.stepped(row)
        self._patience.earn(row.step_time_s)
        self._waited_s = 0.0

    def tripped(self, report: dict[str, Any]) -> None:
        if self._order["reporter"]:
            self._say("tripped", report=report)

    def digest(self, step: int, hex: str, of_ranks: tuple[str, ...]) -> None:
        if self._order["reporter"]:
            self._say("digest", step=step, digest=hex)
            if step == self._order["recheck"]:
                self._say("recomputed", step=step, digests=of_ranks)

    # --- joining --------------------------------------------------------------------------------

    def _join(self) -> World:
        order = self._order
        began = time.monotonic()
        self._beacon.enter("rendezvous", 0)
        process_groups.join(
            order["store_host"],
            order["store_port"],
            self._number,
            self._rank,
            order["world_size"],
            order["timeout_s"],
            order["device"],
            self._spec.detection.collective_timeout_s,
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
        self._entered_at = time.monotonic()
        self._beacon.enter("build", 0)
        if self.built_for is None:
            self._recipe.build(world)
        elif _same_place(self.built_for, world):
            self._recipe.rebind(world)
        else:
            raise CannotMove(
                f"a process of rank {self.built_for.rank} cannot take rank {world.rank}"
            )
        self.built_for = world
        process_groups.bury()

    def _restore(self) -> int:
        began = time.monotonic()
        restore = self._order["restore"]
        tier, step = Tier(restore["tier"]), int(restore["step"])
        self._beacon.enter(_RESTORE_PHASES.get(tier, "restore_far"), step)
        self._faults.reach("restore")
        self._recipe.guard_memory.know(Ledger.of(self._order["skipped"]))
        if tier is Tier.INIT:
            self._begin(restore)
        elif tier is Tier.REMOTE:
            self._from_remote(restore["uri"], step)
        elif tier is Tier.RESHARD:
            self._want_from_other_mesh(step)
            self._from_memory(restore)
        else:
            self._from_memory(restore)
        self._check_fence()
        if self._spec.checkpoint.memory.every_steps:
            self._ensure_in_memory(step)
        self._phases["restore"] = time.monotonic() - began
        return step

    def _want_from_other_mesh(self, step: int) -> None:
        """Make the segment that the agent is to fill: only this rank knows its layout. What belongs
        to a rank alone is on another mesh as the seed has it, whatever tier the state is from."""
        self._recipe.initialize()
        self._own.segment()
        own = self._recipe.freeze(step).rank_bytes()
        self._say("wanted", own={name: b64encode(raw).decode() for name, raw in own.items()})

    def _from_memory(self, restore: dict[str, Any]) -> None:
        word = self._link.wait_state(self._number, self._order["timeout_s"])
        if not word["ok"]:
            raise (StateDamaged if word.get("damaged") else RestoreFailed)(word["message"])
        path = self._own.path
        try:
            segment = Segment.open(path)
        except (SegmentError, FileNotFoundError) as error:
            raise RestoreFailed(str(error)) from error
        if segment.layout != self._recipe.layout():
            raise RestoreFailed(f"{path.name} has another layout than the model of this rank")
        for commit in segment.commits():
            if (commit.attempt, commit.step) == (restore["attempt"], restore["step"]):
                if not segment.verify(commit):
                    segment.quarantine(commit)
                    raise StateDamaged(f"step {commit.step} in memory does not match its digest")
                self._recipe.read_state(segment.payload(commit))
                self._own.stand_on(segment, commit)
                self._start_digest = commit.digest
                return
        raise RestoreFailed(f"step {restore['step']} is not in this node's memory")

    def _begin(self, restore: dict[str, Any]) -> None:
        options = StorageOptions(**self._config["remote"]["options"])
        try:
            begin(self._recipe, restore, self._order["mesh"], self._rank, options)
        except StorageError as error:
            raise RestoreFailed(str(error)) from error

    def _from_remote(self, uri: str, step: int) -> None:
        layout = self._recipe.layout()
        payload = memoryview(bytearray(layout.payload_bytes))
        self._recipe.initialize()  # what a checkpoint of another mesh does not hold
        self._recipe.write_state(payload, step)
        options = StorageOptions(**self._config["remote"]["options"])
        # There is nothing else to do meanwhile: try for as long as patience lasts.
        storage = open_storage(uri, replace(options, attempts=RESTORE_ATTEMPTS))
        at = failing_as_told(storage, Path(self._config["remote"]["fault_file"]))
        try:
            load_whole_state(at, layout, payload, mesh=self._order["mesh"], rank=self._rank)
        except BadCheckpoint as error:
            with contextlib.suppress(StorageError):  # a storage that fails must not hide the cause
                quarantine(at, str(error))
            raise StateDamaged(str(error)) from error
        except CheckpointError as error:
            raise RestoreFailed(str(error)) from error
        self._recipe.read_state(payload)

    def _ensure_in_memory(self, step: int) -> None:
        """Whatever tier the state came from: from now on memory has it."""
        if self._own.memory_step != step:
            self._start_digest = self._own.write_memory(self._recipe.freeze(step), step).digest

    def _check_fence(self) -> None:
        if self._link.is_fenced(self._number):
            raise Fenced(self._number)

    # --- checkpoints ----------------------------------------------------------------------------

    def _memory_due(self, step: int) -> bool:
        every = self._intervals[0]
        return every > 0 and step % every == 0

    def _remote_due(self, step: int) -> bool:
        every = self._intervals[1]
        return every > 0 and step % every == 0

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """What the training thread spends in here is what checkpoints cost it."""
        began = time.monotonic()
        try:
            yield
        finally:
            waited_s = time.monotonic() - began
            self._waited_s += waited_s
            self._all_waited_s += waited_s

    def _say(self, op: str, **fields: Any) -> None:
        self._link.send({"op": op, "attempt": self._number, "rank": self._rank, **fields})


def _same_place(before: World, after: World) -> bool:
    return (before.rank, before.mesh, before.device) == (after.rank, after.mesh, after.device)


_KINDS: dict[type[Exception] | tuple[type[Exception], ...], ErrorKind] = {
    (StateDamaged, OtherHistory): ErrorKind.DAMAGED,
    RestoreFailed: ErrorKind.RESTORE,
    StorageError: ErrorKind.STORAGE,
    NonFiniteStep: ErrorKind.NOT_FINITE,
    CorruptionFound: ErrorKind.CORRUPTION,
}
"""The first that fits counts."""


def _kind(error: Exception) -> str:
    for types, kind in _KINDS.items():
        if isinstance(error, types):
            return kind
    if isinstance(error, GuardTripped):
        stops = error.trip.decision is Decision.STOP
        return ErrorKind.GUARD_STOP if stops else ErrorKind.GUARD
    if process_groups.is_communication_error(error):
        return ErrorKind.COMMUNICATION
    return ErrorKind.INTERNAL if isinstance(error, WorkersError) else ErrorKind.USER
