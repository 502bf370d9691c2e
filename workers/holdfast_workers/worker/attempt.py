"""One worker's part in one attempt: rendezvous, model, state, training, checkpoints.

The sequence: join the process groups under the attempt's own prefix, build the model (or rebind the
live model to the new groups), load the state that the order names, report `joined`, train. A step
is applied only after the world-wide agreement and only if the attempt is not fenced by then. Every
message to the agent carries the attempt.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from holdfast_workers.checkpoint.manifest import BadCheckpoint, CheckpointError
from holdfast_workers.checkpoint.storage import StorageError
from holdfast_workers.data.corpus import DataUnavailable
from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import control_channel
from holdfast_workers.memory.background_copy import WaitBudget
from holdfast_workers.memory.segment import Segment, SegmentError
from holdfast_workers.memory.segment_store import mesh_tag
from holdfast_workers.models.library_model import UnfitModel
from holdfast_workers.parallelize import process_groups
from holdfast_workers.protocol.findings import TripReport
from holdfast_workers.protocol.messages import (
    HOLD_PHASE,
    ErrorKind,
    ErrorReport,
    JoinOrder,
    Restore,
    StepRow,
    Tier,
)
from holdfast_workers.protocol.processes import (
    LoadOrder,
    LoadOutcome,
    SegmentReady,
    SignalOfWorker,
    StateReply,
    StepDigest,
    StepReport,
    WorkerMessage,
    WorkerSignal,
    ZygoteConfig,
)
from holdfast_workers.protocol.signals import (
    FirstStep,
    GuardTripReported,
    StepRecomputed,
    WorkerDone,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
)
from holdfast_workers.published.weight_reader import WeightsUnavailable
from holdfast_workers.published.weight_set import MANIFEST
from holdfast_workers.state.digest import ShardDigest
from holdfast_workers.state.replicas import CorruptionFound
from holdfast_workers.training.determinism import advice
from holdfast_workers.training.evaluation import EVALUATION_PHASE, LOSS, PERPLEXITY
from holdfast_workers.training.guard_memory import LedgerMismatch
from holdfast_workers.training.guards import GuardAction
from holdfast_workers.training.rank_log import RankLog
from holdfast_workers.training.recipe import GuardTripped, NonFiniteStep, World, make_room
from holdfast_workers.training.remote_save_schedule import RemoteSaveSchedule
from holdfast_workers.training.skipped_windows import Ledger
from holdfast_workers.training.step_loop import DigestSource, Steps
from holdfast_workers.worker.first_weights import initialize_with_weights, published_weights_of
from holdfast_workers.worker.initial_state import knows_all_weights, load_initial_state
from holdfast_workers.worker.rank_checkpoints import RankCheckpoints
from holdfast_workers.worker.remote_loading import LoadBuffer, load_object, load_with_room

if TYPE_CHECKING:
    from holdfast_workers.fault_injection.fault_points import FaultPoints
    from holdfast_workers.progress.beacon import Beacon
    from holdfast_workers.state.layout import StateLayout
    from holdfast_workers.training.recipe import Recipe
    from holdfast_workers.training.step_agreement import Agreed

COPY_GRACE_S = 1.0
LEAVE_WAIT_S = 5.0
"""How long the last step before a planned change of the mesh waits for replication."""
COLD_STEPS = 3
"""The first steps of an attempt touch memory for the first time, and may compile."""

_CHOOSABLE = ("loss", "grad_norm", LOSS, PERPLEXITY)
"""The metrics by which `KeepBestSpec` chooses."""
_RESTORE_PHASES = {Tier.OWN_RAM: "restore", Tier.PARTNER_RAM: "restore_partner"}
"""Phases whose durations are learned per tier; all other tiers share the phase `restore_far`."""
WEIGHTS_PHASE = "read_weights"
"""The phase of each read of published weights."""


class AttemptFenced(Exception):
    """The attempt is over: a newer one was announced."""


class RestoreFailed(Exception):
    """The state named in the order cannot be loaded."""


class StateDamaged(RestoreFailed):
    """The state exists but differs from the saved one; it must not be tried again."""


class CannotMove(WorkersError):
    """A live process got another place in the mesh than it was built for. torch keeps the
    coordinates of the first place and would shard the model for that place."""


class ControlLink(Protocol):
    """The control link of the worker, as far as an attempt uses it."""

    def send(self, message: WorkerMessage) -> None: ...
    def is_fenced(self, attempt: int) -> bool: ...
    def wait_replicated(self, attempt: int, step: int, timeout_s: float) -> int: ...
    def wait_state(self, attempt: int, timeout_s: float) -> StateReply: ...
    def wait_load(self, attempt: int, number: int, timeout_s: float) -> LoadOutcome: ...
    def is_to_finish(self, attempt: int) -> bool: ...
    def is_to_leave(self, attempt: int) -> bool: ...
    def has_lease(self, attempt: int) -> bool: ...
    def await_lease(self, attempt: int) -> None: ...
    def intervals(self, attempt: int) -> tuple[int, int] | None: ...


class RankAttempt:
    """Runs one join order to its end; implements the hooks of the step loop."""

    def __init__(
        self,
        order: JoinOrder,
        config: ZygoteConfig,
        recipe: Recipe,
        link: ControlLink,
        faults: FaultPoints,
        beacon: Beacon,
        built_for: World | None,
    ) -> None:
        self.built_for = built_for  # the world that the recipe's live model was built for
        self._join_order = order
        self._config = config
        self._recipe = recipe
        self._link = link
        self._faults = faults
        self._beacon = beacon
        self._number = order.attempt
        self._rank = order.rank
        self._reports = order.local_rank == 0  # for all ranks of the node
        self._spec = recipe.spec
        self._arrived_step = -1  # newest step in memory that is known to be at the partners
        self._load_numbers = count(1)
        self._step = 0
        self._first_step = self._cold_until = self._first_evaluated = 0
        self._evaluated = -1  # the newest step whose evaluation has begun
        self._start_digest: ShardDigest | None = None
        self._replicated = -1  # the newest step in memory that was reported to be at the partners
        self._steps: Steps | None = None
        self._checkpoints = RankCheckpoints(order, link.send, faults)
        self._log = RankLog(self._rank, self._number, order.form.mesh, self._spec.train.last_step)
        self._wait_budget = WaitBudget(config.replication_patience_s, config.replication_share)
        self._intervals = order.form.intervals or self._spec.checkpoint.first_intervals
        self._remote_saves = RemoteSaveSchedule()
        self._saving = (False, False)  # saves (memory, remote) that run beside the present step
        self._step_wait_s = 0.0  # the training thread's waits for checkpoints in this step
        self._total_wait_s = 0.0
        self._entered_at = 0.0
        self._phases: dict[str, float] = {}
        faults.rank = self._rank
        recipe.leave_if_over = self._check_fence

    def run(self) -> None:
        """Join, restore and train to the last step. Raises the exception that ended it early."""
        self._faults.reach("forming")
        world = self._join()
        self._build(world)
        last = self._recipe.run(lambda: self._start_steps(world))
        self._beacon.enter("save", last)
        self._checkpoints.finish()
        assert self._steps is not None
        left, early = self._steps.left, self._steps.early
        process_groups.leave(keep=left)
        if left:
            self._log.log_left(last)
            self._signal(WorkerLeft(last))
        else:
            self._log.log_done(last, early)
            self._signal(WorkerDone(last, early))

    def _start_steps(self, world: World) -> Steps:
        """Load the state once the recipe is built, and report that this rank has joined."""
        self._phases["build"] = time.monotonic() - self._entered_at
        self._check_fence()
        start = self._restore()
        tier = self._join_order.seat.restore.tier
        self._signal(WorkerJoined(start, tier, self._phases))
        self._log.log_joined(start, tier, self._phases)
        self._step = start
        self._first_step, self._cold_until = start + 1, start + COLD_STEPS
        steps = Steps(self._recipe, world, self._spec, self, start, self._start_digest)
        if steps.over:  # the fault was between the last step and its save
            snapshot = self._recipe.freeze(start)
            self._checkpoints.leave_for_saver(start, snapshot.layout, snapshot.copy_to, {})
        self._steps = steps
        return steps

    def fenced(self) -> None:
        """Log that the attempt was ended from outside."""
        self._log.log_fenced(self._step)

    def failed(self, error: Exception) -> None:
        """Log and report an exception that no fence explains. The log comes first, because the
        end of the job ends this process."""
        kind, where = _kind(error), ""
        if self._evaluated > self._step and kind is not ErrorKind.COMMUNICATION:
            where = f"in the evaluation of step {self._evaluated}: "
        report = ErrorReport(
            kind=kind,
            type=type(error).__name__,
            message=control_channel.shorten_middle(f"{where}{error}{advice(error)}"),
            traceback=control_channel.shorten_middle("".join(traceback.format_exception(error))),
            step=self._step,
        )
        self._log.log_failed(self._step, report.kind, report.type, report.message, report.traceback)
        trip = error.report if isinstance(error, GuardTripped) else None
        finding = error.finding if isinstance(error, CorruptionFound) else None
        self._signal(WorkerFailed(report, trip, finding))

    def abandon(self) -> None:
        """Discard the unfinished step and the process groups; the process stays alive.

        A running copy may complete if that is quick, so that its step is not lost.
        """
        self._checkpoints.end(COPY_GRACE_S)
        self._recipe.abandon_step()
        process_groups.leave(keep=True)

    # --- hooks of the training loop -------------------------------------------------------------

    def phase(self, name: str, step: int, micro_batch: int = 0) -> None:
        first = name == EVALUATION_PHASE and step == self._first_evaluated
        self._beacon.cold = first or step <= self._cold_until
        self._beacon.enter(name, step, micro_batch)
        self._faults.reach(name, step, micro_batch)

    def blocked_s(self) -> float:
        return self._beacon.blocked_ns * 1e-9 + self._total_wait_s

    def commit_gate(self, step: int) -> None:
        with self._waiting():
            self._checkpoints.await_captured()
        if self._join_order.form.leased:
            self._await_lease()
        self._check_fence()

    def evaluation_begins(self, step: int) -> None:
        """An attempt has made its first step, however long its evaluation lasts: the time until
        its row is not a part of `timeouts.first_step_s`."""
        self._evaluated = step
        self._first_evaluated = self._first_evaluated or step
        if self._reports and step == self._first_step:
            self._signal(FirstStep(step, time.time(), committed=False))

    def _await_lease(self) -> None:
        """Wait for a lease if there is none, in a separate phase without a bound, so that the wait
        counts neither as a hang nor for learned limits."""
        if not self._link.has_lease(self._number):
            with self._beacon.nested_phase(HOLD_PHASE, math.inf):
                self._link.await_lease(self._number)

    def replicated_step(self) -> int:
        """The newest step that all partners hold. Waits briefly for a late one; otherwise the next
        memory checkpoint is skipped, on all ranks. So it is while a slow reader needs the slot that
        the next one would overwrite."""
        replicated, read = self._await_replicated(), self._checkpoints.step_being_read()
        self._replicated = replicated if read is None else min(replicated, read)
        return self._replicated

    def _await_replicated(self) -> int:
        with self._waiting():
            self._checkpoints.await_captured()
            if self._checkpoints.memory_step < 0 or not self._checkpoints.is_newest_in_memory():
                return self._checkpoints.memory_step  # nothing to wait for
            began = time.monotonic()
            since_s = began - self._checkpoints.memory_committed_at
            leaves = self.leave_wanted(self._step + 1)
            wanted = leaves or self._memory_due(self._step + 1)
            wait_s = self._wait_budget.allowance_s(since_s) if wanted else 0.0
            wait_s = LEAVE_WAIT_S if leaves else wait_s
            step = self._link.wait_replicated(self._number, self._checkpoints.memory_step, wait_s)
            self._learn_from_waiting(since_s, time.monotonic() - began, step, wanted=wanted)
            return step

    def _learn_from_waiting(
        self, since_s: float, waited_s: float, step: int, *, wanted: bool
    ) -> None:
        """Record a wait once for each checkpoint that arrived, and for a due one that has not."""
        arrived = step >= self._checkpoints.memory_step
        if arrived and self._arrived_step < self._checkpoints.memory_step:
            self._arrived_step = self._checkpoints.memory_step
        elif arrived or not wanted:
            return
        self._wait_budget.record_wait(since_s, waited_s, arrived=arrived)

    def stop_wanted(self) -> bool:
        return self._link.is_to_finish(self._number)

    def leave_wanted(self, step: int) -> bool:
        planned = self._join_order.form.leave_after
        return self._link.is_to_leave(self._number) or (planned is not None and step >= planned)

    def may_leave(self) -> bool:
        return self._replicated >= self._checkpoints.memory_step

    def intervals(self) -> tuple[int, int]:
        return self._link.intervals(self._number) or self._intervals

    def is_saving(self) -> bool:
        return self._checkpoints.has_pending_saves()

    def checkpoint(
        self, step: int, recipe: Recipe, agreed: Agreed, last: bool
    ) -> DigestSource | None:
        """Start to copy step `step` to memory if due, and for the remote tier if due.

        The copy runs during the next forward and backward. The slot of the checkpoint before the
        last is overwritten only once the last one has reached every rank's partners. So at least
        one step is always complete, whichever process dies.
        """
        self._step = step
        self._intervals = agreed.intervals
        leaves = agreed.leave and agreed.intervals[0] > 0
        wanted = leaves or self._memory_due(step)
        to_memory = wanted and agreed.replicated_step >= self._checkpoints.memory_step
        metrics, best = _metrics_of_checkpoint(agreed), self._spec.checkpoint.remote.keep_best
        to_remote = self._remote_saves.is_due(
            step,
            agreed.intervals[1],
            saving=agreed.saving,
            last=last,
            makes_up=best is None or best.metric in metrics,
        )
        self._saving = (to_memory, agreed.saving or to_remote)
        if to_remote:  # rare and slower, so its duration is learned apart from other steps
            self._beacon.enter("save", step)
        if not (to_memory or to_remote):
            return None
        with self._waiting():
            snapshot = recipe.freeze(step)
            of_remote = metrics if to_remote else None
            return self._checkpoints.start(
                snapshot, step, to_memory=to_memory, metrics=of_remote, last=last
            )

    def committed(self, row: StepRow) -> None:
        if self._reports:
            row = replace(
                row,
                checkpoint_wait_s=self._step_wait_s,
                memory_saved=self._saving[0],
                remote_saving=self._saving[1],
            )
            self._link.send(StepReport(self._rank, row))
        self._log.log_step(row)
        self._wait_budget.earn(row.step_time_s)
        self._step_wait_s = 0.0

    def tripped(self, report: TripReport) -> None:
        if self._reports:
            self._signal(GuardTripReported(report))

    def digest(self, step: int, hex: str, of_ranks: tuple[str, ...]) -> None:
        if self._reports:
            if not self._is_of_other_mesh(step):
                self._link.send(StepDigest(step, hex, self._join_order.attempt))
            if step == self._join_order.form.recheck:
                self._signal(StepRecomputed(step, of_ranks))

    def _is_of_other_mesh(self, step: int) -> bool:
        """Whether the state after `step` was computed on another mesh: its digest is that of the
        shards on that mesh."""
        restore = self._join_order.seat.restore
        if step != restore.step or not restore.mesh:  # nearly always
            return False
        own = {
            axis for axis in mesh_tag(self._join_order.form.mesh).split(",") if axis[-2:] != "=1"
        }
        other = {axis for axis in restore.mesh.split(",") if axis[-2:] != "=1"} - {""}
        return own != other

    # --- joining --------------------------------------------------------------------------------

    def _join(self) -> World:
        order = self._join_order
        began = time.monotonic()
        self._beacon.enter("rendezvous", 0)
        process_groups.join(
            order.form.store_host,
            order.form.store_port,
            self._number,
            self._rank,
            order.form.world_size,
            self._config.plan.form_timeout_s,
            self._config.device,
            self._spec.detection.collective_timeout_s,
        )
        self._phases["rendezvous"] = time.monotonic() - began
        self._faults.reach("rendezvous")
        self._check_fence()
        return World(
            rank=self._rank,
            world_size=order.form.world_size,
            mesh=order.form.mesh,
            attempt=self._number,
            device=self._config.device,
        )

    def _build(self, world: World) -> None:
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
        process_groups.release_kept()

    def _restore(self) -> int:
        began = time.monotonic()
        restore = self._join_order.seat.restore
        tier, step = restore.tier, restore.step
        phase = _RESTORE_PHASES.get(tier)
        bound_s = 0.0 if phase is not None else self._config.plan.load_bound_s
        self._beacon.enter(phase or "restore_far", step, bound_s=bound_s)
        self._faults.reach("restore")
        self._recipe.guard_memory.set_ledger(Ledger.of(self._join_order.form.skipped))
        if tier is Tier.INIT:
            self._load_initial_state(restore)
        elif tier is Tier.REMOTE:
            self._from_remote(restore.uri, step)
        elif tier is Tier.RESHARD:
            self._request_reshard(step)
            self._from_memory(restore)
        else:
            self._from_memory(restore)
        self._check_fence()
        if self._spec.checkpoint.memory.every_steps:
            self._ensure_in_memory(step)
        self._phases["restore"] = time.monotonic() - began
        return step

    def _request_reshard(self, step: int) -> None:
        """Create the segment that the agent shall fill; only this rank knows its layout. State that
        belongs to one rank alone comes from the seed on another mesh, for every tier."""
        self._recipe.initialize()
        self._checkpoints.segment(self._recipe.layout())
        own = self._recipe.freeze(step).rank_bytes()
        self._link.send(SegmentReady(self._number, own))

    def _from_memory(self, restore: Restore) -> None:
        reply = self._link.wait_state(self._number, self._config.plan.form_timeout_s)
        if reply.problem:
            raise (StateDamaged if reply.damaged else RestoreFailed)(reply.problem)
        path = self._checkpoints.path
        try:
            segment = Segment.open(path)
        except (SegmentError, FileNotFoundError) as error:
            raise RestoreFailed(str(error)) from error
        make_room(self._recipe, segment.layout)
        if segment.layout != self._recipe.layout():
            raise RestoreFailed(f"{path.name} has a different layout from the model of this rank")
        for commit in segment.commits():
            if (commit.attempt, commit.step) == (restore.attempt, restore.step):
                if not segment.verify(commit):
                    segment.quarantine(commit)
                    raise StateDamaged(f"step {commit.step} in memory does not match its digest")
                payload = segment.payload(commit)
                self._recipe.read_state(payload)
                self._checkpoints.adopt_commit(segment, commit)
                if segment.layout == self._recipe.layout():  # else its objects had another room
                    self._start_digest = ShardDigest.of_payload(
                        payload, segment.layout, commit.digest
                    )
                return
        raise RestoreFailed(f"step {restore.step} is not in the memory of this node")

    def _load_initial_state(self, restore: Restore) -> None:
        def load(buffer: LoadBuffer, layout: StateLayout) -> None:
            self._load(buffer, layout, restore.uri, own=False)

        try:
            load_initial_state(self._recipe, restore, load, self._initialize)
        except (StorageError, WeightsUnavailable) as error:
            raise RestoreFailed(str(error)) from error

    def _initialize(self) -> None:
        """Load the state of step 0. Published weights may take long: each few megabytes are a sign
        of life."""
        published = published_weights_of(self._spec)
        if published is None:
            self._recipe.initialize()
            return
        order = LoadOrder(
            self._number,
            self._rank,
            published.uri,
            self._join_order.form.mesh,
            own=False,
            object_name=MANIFEST,
            payload_bytes=published.manifest_bytes,
        )
        bound_s = self._config.plan.load_bound_s or self._spec.detection.first_limit_s
        reads = count()

        def on_read() -> None:
            self._check_fence()
            self._beacon.enter(WEIGHTS_PHASE, 0, next(reads), bound_s)

        with self._beacon.nested_phase(WEIGHTS_PHASE, bound_s):
            initialize_with_weights(
                self._recipe,
                lambda: load_object(order, self._ask_loader),
                on_read,
                self._config.plan.form_timeout_s,
            )

    def _from_remote(self, uri: str, step: int) -> None:
        def load(buffer: LoadBuffer, layout: StateLayout) -> None:
            self._load(buffer, layout, uri, own=True)

        layout = self._recipe.layout()
        buffer = LoadBuffer(uri, layout.payload_bytes)
        self._recipe.initialize()  # for the parts that a checkpoint of another mesh lacks
        self._recipe.write_state(buffer.payload, step)
        try:
            payload, layout = load_with_room(load, buffer, layout, uri)
        except BadCheckpoint as error:
            raise StateDamaged(str(error)) from error
        except CheckpointError as error:
            raise RestoreFailed(str(error)) from error
        make_room(self._recipe, layout)
        self._recipe.read_state(payload)

    def _load(self, buffer: LoadBuffer, layout: StateLayout, uri: str, *, own: bool) -> None:
        mesh = self._join_order.form.mesh
        exact = not own and knows_all_weights(self._spec, mesh)
        order = LoadOrder(self._number, self._rank, uri, mesh, own, exact)
        buffer.load(order, layout, Path(self._config.storage_fault_file), self._ask_loader)

    def _ask_loader(self, order: LoadOrder) -> LoadOutcome:
        numbered = replace(order, number=next(self._load_numbers))
        self._link.send(numbered)
        timeout_s = self._config.plan.load_timeout_s
        return self._link.wait_load(self._number, numbered.number, timeout_s)

    def _ensure_in_memory(self, step: int) -> None:
        """Commit the restored state to memory, if it is not there yet."""
        if self._checkpoints.memory_step != step:
            _, self._start_digest = self._checkpoints.write_memory(self._recipe.freeze(step), step)

    def _check_fence(self) -> None:
        if self._link.is_fenced(self._number):
            raise AttemptFenced(self._number)

    # --- checkpoints ----------------------------------------------------------------------------

    def _memory_due(self, step: int) -> bool:
        every = self._intervals[0]
        return every > 0 and step % every == 0

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time inside as the training thread's wait for checkpoints."""
        began = time.monotonic()
        try:
            yield
        finally:
            waited_s = time.monotonic() - began
            self._step_wait_s += waited_s
            self._total_wait_s += waited_s

    def _signal(self, detail: SignalOfWorker) -> None:
        self._link.send(WorkerSignal(self._number, self._rank, detail))


def _metrics_of_checkpoint(agreed: Agreed) -> dict[str, float]:
    """The metrics by which the best checkpoints are chosen (`KeepBestSpec`), as far as the step has
    them."""
    found = {"loss": agreed.loss, "grad_norm": agreed.grad_norm, **agreed.user_metrics}
    return {name: found[name] for name in _CHOOSABLE if name in found}


def _same_place(before: World, after: World) -> bool:
    return (before.rank, before.mesh, before.device) == (after.rank, after.mesh, after.device)


_KINDS: dict[type[Exception] | tuple[type[Exception], ...], ErrorKind] = {
    (StateDamaged, LedgerMismatch): ErrorKind.DAMAGED,
    RestoreFailed: ErrorKind.RESTORE,
    StorageError: ErrorKind.STORAGE,
    DataUnavailable: ErrorKind.DATA,
    NonFiniteStep: ErrorKind.NOT_FINITE,
    CorruptionFound: ErrorKind.CORRUPTION,
    UnfitModel: ErrorKind.USER,
}
"""The first matching entry counts."""


def _kind(error: Exception) -> ErrorKind:
    for types, kind in _KINDS.items():
        if isinstance(error, types):
            return kind
    if isinstance(error, GuardTripped):
        stops = error.trip.decision is GuardAction.STOP
        return ErrorKind.GUARD_STOP if stops else ErrorKind.GUARD
    if process_groups.is_communication_error(error):
        return ErrorKind.COMMUNICATION
    return ErrorKind.INTERNAL if isinstance(error, WorkersError) else ErrorKind.USER
