"""The guards' part of a rank's state: loss and gradient norm of the last steps, and the ledger of
skipped windows. It is identical on every rank and on any mesh.

It changes only when a step is applied, so like all other state it may be copied while the next
step computes.
"""

from __future__ import annotations

import torch

from holdfast_workers.errors import WorkersError
from holdfast_workers.spec import HISTORY_STEPS
from holdfast_workers.state.rank_state import ShardBox, StateTensor
from holdfast_workers.training.guards import MAX_RANGES
from holdfast_workers.training.skipped_windows import Ledger


class LedgerMismatch(WorkersError):
    """A saved state has read windows that are skipped according to the ledger."""


class GuardMemory:
    """`ledger` is the whole known ledger, including windows that no step has reached yet."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._known = Ledger()
        self._in_tensor = Ledger()
        self._values = torch.zeros((2, HISTORY_STEPS), dtype=torch.float64)
        self._ranges = torch.zeros((MAX_RANGES, 2), dtype=torch.int64)

    def pieces(self, *, primary: bool) -> list[StateTensor]:
        """Its tensors as parts of the state. `primary` is true on one rank of the world."""
        return [
            StateTensor(name, tensor, _whole(tensor, primary), weight=False)
            for name, tensor in (("guards.history", self._values), ("data.skipped", self._ranges))
        ]

    def set_ledger(self, ledger: Ledger) -> None:
        """Replace the ledger by the one that every rank received, before the state is loaded."""
        self._known = self.ledger = ledger

    def reset(self) -> None:
        """Set the state of step 0."""
        self._values.zero_()
        self._ranges.zero_()
        self._in_tensor = Ledger()
        self.ledger = self._known

    def skip(self, start: int, end: int) -> None:
        """Skip the windows [start, end) from now on."""
        self.ledger |= Ledger(((start, end),))

    def record_step(self, step: int, loss: float, grad_norm: float) -> None:
        """`step` has been applied: add it to the history."""
        self._values[:, step % HISTORY_STEPS] = torch.tensor([loss, grad_norm]).double()
        passed = self.ledger.passed(step)
        if passed != self._in_tensor:
            self._ranges.zero_()
            self._ranges[: len(passed.ranges)] = torch.tensor(passed.ranges)
            self._in_tensor = passed

    def adopt_loaded_state(self, step: int) -> None:
        """The tensors now hold the loaded state of `step`. Raises LedgerMismatch."""
        passed = Ledger.of(self._ranges.tolist())
        merged = passed | self._known
        if merged.passed(step) != passed:
            raise LedgerMismatch(
                f"the state of step {step} has skipped windows {list(passed.ranges)}; "
                f"by the ledger it should be {list(merged.passed(step).ranges)}"
            )
        self.ledger, self._in_tensor = merged, passed

    def history_before(self, step: int, steps: int) -> tuple[list[float], list[float]]:
        """Loss and gradient norm of up to `steps` steps applied before `step`, oldest first."""
        first = max(1, step - min(steps, HISTORY_STEPS))
        begin, end = first % HISTORY_STEPS, step % HISTORY_STEPS
        if first < step and begin >= end:  # the range wraps around the ring
            older, newer = self._values[:, begin:].tolist(), self._values[:, :end].tolist()
            return older[0] + newer[0], older[1] + newer[1]
        losses, norms = self._values[:, begin:end].tolist()
        return losses, norms


def _whole(tensor: torch.Tensor, primary: bool) -> ShardBox:
    shape = tuple(tensor.shape)
    return ShardBox(shape, (0,) * len(shape), shape, primary)
