"""The step loop: the work around the steps of a training program, the same for every program.

Each step commits through one agreement of the whole world. The digest of the state after step
`s` is part of the agreement of step `s + 1`; after the last step, a closing agreement carries the
last digest. A guard that trips is handled before the step is applied
(:mod:`holdfast_workers.training.guard_trips`). The last step is that of the spec, the step in
whose agreement any rank requested to stop, or to leave the attempt, or the step whose agreed
evaluation used up the patience of `evaluate.stop`; so all ranks stop after the same step.
Exceptions of collectives, of the gate and of the recipe leave :func:`train` unchanged; the caller
interprets them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from holdfast_workers.protocol.findings import EarlyStop, TripReport
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.digest import ShardDigest
from holdfast_workers.state.replicas import ReplicaComparison, replica_equality
from holdfast_workers.training.evaluation import agree_on_evaluation
from holdfast_workers.training.guard_trips import GuardRunner
from holdfast_workers.training.guards import trip_report
from holdfast_workers.training.rank_log import log_not_finite
from holdfast_workers.training.recipe import (
    EvaluatedRecipe,
    GuardTripped,
    Recipe,
    StepOutcome,
    World,
)
from holdfast_workers.training.step_agreement import (
    Agreed,
    Contribution,
    Record,
    fold,
    gather,
    mean_user_metrics,
    pack_user_metrics,
)

DigestSource = Callable[[], ShardDigest]
"""Waits for a shard digest that is being computed; raises the error that prevented it."""

NO_DIGEST = ShardDigest(bytes(16).hex(), bytes(16).hex())

_CLOSING_SHARE = Contribution(
    loss_sum=0.0, count=0, grad_sq=0.0, data_index=0, samples=0, sample_count=0
)


class Hooks(Protocol):
    """Callbacks of the loop into the rank's runtime, which may also stop the loop.

    In a class that derives from it, the callbacks that return a value have the defaults below: a
    rank without peers, checkpoints or orders.
    """

    def phase(self, name: str, step: int, micro_batch: int = 0) -> None:
        """Phase `name` of `step` begins: load, forward and backward of each micro-batch, agree,
        optimizer, checkpoint; or a phase that the recipe declares."""
        ...

    def blocked_s(self) -> float:
        """Total time that this rank has waited for its peers and for its checkpoints."""
        return 0.0

    def commit_gate(self, step: int) -> None:
        """Called between the agreement and the change of state, and again after an evaluation of
        the step; raises to forbid the step."""
        ...

    def evaluation_begins(self, step: int) -> None:
        """`step` has been applied, and its evaluation begins; its row follows after that."""
        ...

    def replicated_step(self) -> int:
        """The newest step of this rank whose state another node also holds; -1 for none."""
        return -1

    def stop_wanted(self) -> bool:
        """Whether this rank received the request to stop after a step that all ranks agree on."""
        return False

    def leave_wanted(self, step: int) -> bool:
        """Whether this rank received the request to leave the attempt after `step`."""
        return False

    def may_leave(self) -> bool:
        """Whether this rank can keep the state after the step in memory; asked after
        `replicated_step`."""
        return True

    def intervals(self) -> tuple[int, int]:
        """Steps between two saves to memory, and to the remote tier, as this rank received them."""
        return 0, 0

    def is_saving(self) -> bool:
        """Whether an earlier state of this rank is still being saved to the remote tier."""
        return False

    def checkpoint(
        self, step: int, recipe: Recipe, agreed: Agreed, last: bool
    ) -> DigestSource | None:
        """`step` has been applied. Returns the source of its shard digest, or None.

        The state may be copied until the next `commit_gate` returns; it does not change before.
        """
        return None

    def committed(self, row: StepRow) -> None:
        """`row.step` has been applied by this rank."""
        ...

    def tripped(self, report: TripReport) -> None:
        """A guard has tripped, and training continues."""
        ...

    def digest(self, step: int, hex: str, of_ranks: tuple[str, ...]) -> None:
        """The digest of the whole world's state after `step`, and of what each rank shares with its
        replicas."""
        ...


def train(
    recipe: Recipe,
    world: World,
    spec: TrainingSpec,
    hooks: Hooks,
    start_step: int,
    start_digest: ShardDigest | None = None,
) -> int:
    """Run steps `start_step` + 1 to the last, and the closing agreement.

    Returns the last step's number.
    """
    return recipe.run(lambda: Steps(recipe, world, spec, hooks, start_step, start_digest))


class Steps:
    """The steps of one attempt, one at a time, from its start state to the last step.

    The driver (a recipe, or a user's function) calls `apply` and `keep` until `over`, and then
    `close`. It implements `recipe.AttemptSteps`.
    """

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        spec: TrainingSpec,
        hooks: Hooks,
        start_step: int,
        start_digest: ShardDigest | None = None,
    ) -> None:
        """`start_digest` is the shard digest of the state at `start_step`, if the caller knows it.
        The digest of that step is reported again, because a fault may have prevented its report."""
        self.applied = start_step
        """The step that was applied last."""
        self._recipe = recipe
        self._spec = spec
        self.early = self._early_stop()
        """Why `applied` is the job's last step, if the job has more."""
        self.over = start_step >= spec.train.last_step or self.early is not None
        """Whether `applied` is the last step of the attempt."""
        self.left = False
        """Whether the attempt is over before the job: the mesh changes."""
        self._world = world
        self._hooks = hooks
        self._guards = GuardRunner(recipe, world, hooks, start_step)
        self._replicas = ReplicaComparison.of(
            world.mesh,
            spec.checks.replica_digest_every_steps,
            spec.checkpoint.digest_every_steps,
            repeatable=spec.train.deterministic == "strict",
            equality=replica_equality(spec),
        )
        self._state_step = -1
        self._state_digest: DigestSource | None = None
        self._step = start_step
        self._pending: Agreed | None = None
        self._agreed_at = 0.0
        self._blocked_s = 0.0  # the total at `_agreed_at`
        known = None if start_digest is None else lambda: start_digest
        self._set_state_digest(start_step, known, self.over)
        self._mark_agreement()
        self._previous = time.perf_counter()

    @property
    def awaits_keep(self) -> bool:
        """Whether a step has been applied and `keep` has not been called for it."""
        return self._pending is not None

    def apply(self) -> None:
        """Compute the next step, agree on it with all ranks, and apply it."""
        self._step = step = self.applied + 1
        outcome = self._make_step(step)
        now = time.perf_counter()
        took_s, self._previous = now - self._previous, now
        outcome = self._with_evaluation(outcome)
        self._hooks.committed(_row(outcome, took_s))
        self.applied = step
        self.early = self._early_stop()
        ends = step == self._spec.train.last_step or outcome.agreed.stop or self.early is not None
        self.left = outcome.agreed.leave and not ends
        self.over = ends or self.left
        self._pending = outcome.agreed

    def keep(self) -> None:
        """Save and digest the state after the applied step, where a save or a digest is due.

        The state then includes all that the driver changed after `apply`.
        """
        if self._pending is None:
            return
        agreed, self._pending = self._pending, None
        self._hooks.phase("checkpoint", self.applied)
        last = self.over and not self.left
        known = self._hooks.checkpoint(self.applied, self._recipe, agreed, last)
        self._set_state_digest(self.applied, known, self.over)

    def phase(self, name: str, micro_batch: int = 0) -> None:
        """Report that phase `name` of the next step begins."""
        self._hooks.phase(name, self.applied + 1, micro_batch)

    def close(self) -> int:
        """Run the closing agreement, which carries the last digest; return the last step."""
        self._step = self.applied + 1
        self._hooks.phase("agree", self._step)
        self._agree(_CLOSING_SHARE)
        return self.applied

    def _make_step(self, step: int) -> StepOutcome:
        """Apply `step`, computed from the first window of data that the guards let pass."""
        while True:
            try:
                outcome = self._recipe.train_step(
                    step, self._agree_and_judge, self._hooks.commit_gate, self._hooks.phase
                )
            except GuardTripped as tripped:
                self._guards.handle_trip(tripped.trip)
                continue
            if outcome.agreed.trip is not None:
                self._hooks.tripped(trip_report(outcome.agreed.trip, None, ()))
            return outcome

    def _with_evaluation(self, outcome: StepOutcome) -> StepOutcome:
        """The outcome of a step with the metrics of its evaluation, if it has one."""
        spec, agreed = self._spec, outcome.agreed
        if not spec.evaluate.is_due(agreed.step, spec.train.last_step):
            return outcome
        if not isinstance(self._recipe, EvaluatedRecipe):
            raise NotImplementedError(f"{type(self._recipe).__name__} cannot carry out `evaluate`")
        began, blocked_s, world = time.perf_counter(), self._hooks.blocked_s(), self._world
        self._hooks.evaluation_begins(agreed.step)
        share = self._recipe.evaluate(agreed.step, self._hooks.phase)
        found = agree_on_evaluation(share, world.attempt, agreed.step, world.world_size)
        self._hooks.commit_gate(agreed.step)  # it may have taken longer than a lease lasts
        took_s = time.perf_counter() - began  # of no step
        self._previous += took_s
        self._agreed_at += took_s
        self._blocked_s += self._hooks.blocked_s() - blocked_s
        if found.not_finite and world.rank == 0:
            log_not_finite(agreed.step, found.not_finite)
        self._recipe.evaluation_memory.record(agreed.step, found.metrics)
        metrics = {**agreed.user_metrics, **found.metrics}
        return replace(outcome, agreed=replace(agreed, user_metrics=metrics))

    def _early_stop(self) -> EarlyStop | None:
        """Whether the state after `applied` is the job's last one by `evaluate.stop`. Its memory is
        a part of the state, so a restore of this state decides the same."""
        if self._spec.evaluate.stop is None or self.applied >= self._spec.train.last_step:
            return None
        if not isinstance(self._recipe, EvaluatedRecipe):
            return None
        return self._recipe.evaluation_memory.early_stop()

    def _set_state_digest(self, step: int, known: DigestSource | None, last: bool) -> None:
        """Provide the digest of the state at `step` for the next agreement, where one is due.

        A state that no checkpoint copies is digested now.
        """
        every = self._spec.checkpoint.digest_every_steps
        reported = every > 0 and (step % every == 0 or last)
        due = reported or self._replicas.is_due(step, last=last)
        self._state_step = step if due else -1
        self._state_digest = None
        if due:
            digest = None if known is not None else _shard_digest(self._recipe, step)
            self._state_digest = known if digest is None else lambda: digest

    def _agree_and_judge(self, share: Contribution) -> Agreed:
        agreed = self._agree(share)
        trip = self._guards.judge(
            agreed.step, agreed.loss, agreed.grad_norm, nonfinite=agreed.nonfinite
        )
        return agreed if trip is None else replace(agreed, trip=trip)

    def _agree(self, share: Contribution) -> Agreed:
        replicated = self._hooks.replicated_step()  # waits for the copy, and accounts for it
        digest = self._state_digest() if self._state_digest is not None else NO_DIGEST
        record = Record(
            attempt=self._world.attempt,
            step=self._step,
            contribution=share,
            state_step=self._state_step,
            state_digest=bytes.fromhex(digest.whole),
            shared_digest=bytes.fromhex(digest.shared),
            replicated_step=replicated,
            stop=self._hooks.stop_wanted(),
            leave=self._hooks.leave_wanted(self._step),
            may_leave=self._hooks.may_leave(),
            intervals=self._hooks.intervals(),
            saving=self._hooks.is_saving(),
            compute_s=self._compute_s(share),
            user_metrics_bytes=len(pack_user_metrics(share.user_metrics)),
        )
        agreed = fold(gather(record, self._world.world_size), self._replicas)
        if agreed.user_metrics_bytes:
            means = mean_user_metrics(
                share.user_metrics, agreed.user_metrics_bytes, self._world.world_size
            )
            agreed = replace(agreed, user_metrics=means)
        self._mark_agreement()
        if agreed.state_digest is not None:
            self._hooks.digest(agreed.state_step, agreed.state_digest, agreed.rank_digests)
        return agreed

    def _compute_s(self, share: Contribution) -> float:
        """The time that this rank computed since the last agreement: elapsed time less waits.
        Unlike processor time, it also shows a rank that was made to sleep."""
        elapsed_s = time.perf_counter() - self._agreed_at
        blocked_s = self._hooks.blocked_s() - self._blocked_s
        return max(0.0, elapsed_s - blocked_s - share.loader_wait_s)

    def _mark_agreement(self) -> None:
        self._agreed_at, self._blocked_s = time.perf_counter(), self._hooks.blocked_s()


def _shard_digest(recipe: Recipe, step: int) -> ShardDigest:
    layout = recipe.layout()
    if layout.shared_bytes < layout.payload_bytes:
        return recipe.freeze(step).shard_digest()
    whole = recipe.state_digest(step)
    return ShardDigest(whole, whole)


def _row(outcome: StepOutcome, step_time_s: float) -> StepRow:
    agreed = outcome.agreed
    return StepRow(
        attempt=agreed.attempt,
        step=agreed.step,
        at=time.time(),
        loss=agreed.loss,
        grad_norm=agreed.grad_norm,
        lr=outcome.lr,
        tokens=outcome.tokens,
        step_time_s=step_time_s,
        samples=agreed.samples,
        protected_step=agreed.replicated_step,
        compute_s=agreed.compute_s,
        own=agreed.user_metrics,
        **agreed.measured(),
    )
