"""The step loop: what happens around a recipe's steps, the same for every recipe.

Each step commits through one agreement of the whole world. The digest of the state after step
`s` rides in the agreement of step `s + 1`; after the last step a closing agreement carries the
last digest. Exceptions of collectives, of the gate and of the recipe leave :func:`train`
unchanged: what they mean is for the caller to decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from holdfast_workers.agreement import Agreed, Contribution, Record, fold, gather
from holdfast_workers.messages import StepRow
from holdfast_workers.recipes.base import Recipe, StepOutcome, World
from holdfast_workers.spec import TrainingSpec

DigestSource = Callable[[], str]
"""Waits for a shard digest that is being computed; raises what prevented it."""

_CLOSING_SHARE = Contribution(
    loss_sum=0.0, count=0, grad_sq=0.0, data_index=0, samples=0, sample_count=0
)


class Hooks(Protocol):
    """What the surroundings of a rank see of its loop, and where they may stop it."""

    def phase(self, name: str, step: int) -> None:
        """Phase `name` of `step` is entered: forward, backward, agree, optimizer, checkpoint."""
        ...

    def commit_gate(self, step: int) -> None:
        """Called between the agreement and the change of state; raises to forbid the step."""
        ...

    def replicated_step(self) -> int:
        """The newest step of this rank whose state also lies on another node; -1 for none."""
        ...

    def checkpoint(self, step: int, recipe: Recipe, agreed: Agreed) -> DigestSource | None:
        """`step` has been applied. What will know the shard digest of its state, or None.

        The state may be copied until the next `commit_gate` returns; nobody changes it before.
        """
        ...

    def committed(self, row: StepRow) -> None:
        """`row.step` has been applied by this rank."""
        ...

    def digest(self, step: int, hex: str) -> None:
        """The digest of the whole world's state after `step` is known."""
        ...


def train(
    recipe: Recipe,
    world: World,
    spec: TrainingSpec,
    hooks: Hooks,
    start_step: int,
    start_digest: str | None = None,
) -> None:
    """Run steps `start_step` + 1 to `spec.train.steps` and the closing agreement.

    `start_digest` is the shard digest of the state at `start_step`, if the caller knows it; the
    digest of that step is reported again, for a fault may have come before it was known.
    """
    _Loop(recipe, world, spec, hooks).run(start_step, start_digest)


class _Loop:
    def __init__(self, recipe: Recipe, world: World, spec: TrainingSpec, hooks: Hooks) -> None:
        self._recipe = recipe
        self._world = world
        self._spec = spec
        self._hooks = hooks
        self._state_step = -1
        self._state_digest: DigestSource | None = None
        self._step = 0

    def run(self, start_step: int, start_digest: str | None) -> None:
        known = None if start_digest is None else lambda: start_digest
        self._note_state(start_step, known)
        previous = time.perf_counter()
        for step in range(start_step + 1, self._spec.train.steps + 1):
            self._step = step
            outcome = self._recipe.train_step(
                step, self._agree, self._hooks.commit_gate, self._hooks.phase
            )
            now = time.perf_counter()
            self._hooks.committed(_row(outcome, now - previous))
            previous = now
            self._hooks.phase("checkpoint", step)
            known = self._hooks.checkpoint(step, self._recipe, outcome.agreed)
            self._note_state(step, known)
        self._step = self._spec.train.steps + 1
        self._hooks.phase("agree", self._step)
        self._agree(_CLOSING_SHARE)

    def _note_state(self, step: int, known: DigestSource | None) -> None:
        """Keep the digest of the state at `step` for the next agreement, where one is due.

        By then the random generators have moved on: what nobody copies is digested now.
        """
        every = self._spec.checkpoint.digest_every_steps
        due = every > 0 and (step % every == 0 or step == self._spec.train.steps)
        self._state_step = step if due else -1
        self._state_digest = None
        if due:
            digest = None if known is not None else self._recipe.state_digest(step)
            self._state_digest = known if digest is None else lambda: digest

    def _agree(self, share: Contribution) -> Agreed:
        replicated = self._hooks.replicated_step()  # waits for the copy, and accounts for it
        digest = self._state_digest() if self._state_digest is not None else ""
        record = Record(
            attempt=self._world.attempt,
            step=self._step,
            contribution=share,
            state_step=self._state_step,
            state_digest=bytes.fromhex(digest) or bytes(16),
            replicated_step=replicated,
        )
        agreed = fold(gather(record, self._world.world_size))
        if agreed.state_digest is not None:
            self._hooks.digest(agreed.state_step, agreed.state_digest)
        return agreed


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
        loader_wait_s=agreed.loader_wait_s,
        samples=agreed.samples,
        protected_step=agreed.replicated_step,
    )
