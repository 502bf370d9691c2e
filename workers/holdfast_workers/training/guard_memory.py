"""What the guards must remember, as a part of a rank's state: the last steps' loss and gradient
norm, and the ledger of windows passed over. Alike on every rank, and on any mesh.

It changes only when a step is applied, so it may be copied in the shadow of the next one like all
other state.
"""

from __future__ import annotations

import torch

from holdfast_workers.errors import WorkersError
from holdfast_workers.spec import HISTORY_STEPS
from holdfast_workers.state.rank_state import Box, Piece
from holdfast_workers.training.guards import MAX_RANGES
from holdfast_workers.training.skipped_windows import Ledger


class OtherHistory(WorkersError):
    """A saved state has read windows which the ledger says were passed over."""


class GuardMemory:
    """`ledger` is all that this rank knows of it, also of windows that lie ahead."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._known = Ledger()
        self._in_tensor = Ledger()
        self._values = torch.zeros((2, HISTORY_STEPS), dtype=torch.float64)
        self._ranges = torch.zeros((MAX_RANGES, 2), dtype=torch.int64)

    def pieces(self, *, primary: bool) -> list[Piece]:
        """As parts of the state. `primary` on one rank of the world."""
        return [
            Piece(name, tensor, _whole(tensor, primary))
            for name, tensor in (("guards.history", self._values), ("data.skipped", self._ranges))
        ]

    def know(self, ledger: Ledger) -> None:
        """What the whole world was told of the ledger before it takes its state; replaces all."""
        self._known = self.ledger = ledger

    def reset(self) -> None:
        """Of step 0."""
        self._values.zero_()
        self._ranges.zero_()
        self._in_tensor = Ledger()
        self.ledger = self._known

    def skip(self, start: int, end: int) -> None:
        """The windows [start, end) are passed over from now on."""
        self.ledger |= Ledger(((start, end),))

    def applied(self, step: int, loss: float, grad_norm: float) -> None:
        """`step` has been applied: from now on it is a part of the past."""
        self._values[:, step % HISTORY_STEPS] = torch.tensor([loss, grad_norm]).double()
        passed = self.ledger.passed(step)
        if passed != self._in_tensor:
            self._ranges.zero_()
            self._ranges[: len(passed.ranges)] = torch.tensor(passed.ranges)
            self._in_tensor = passed

    def was_read(self, step: int) -> None:
        """The tensors hold the state of `step`, just loaded. Raises OtherHistory."""
        passed = Ledger.of(self._ranges.tolist())
        everything = passed | self._known
        if everything.passed(step) != passed:
            raise OtherHistory(
                f"the state of step {step} has passed over windows {list(passed.ranges)}; "
                f"by the ledger it should be {list(everything.passed(step).ranges)}"
            )
        self.ledger, self._in_tensor = everything, passed

    def before(self, step: int, steps: int) -> tuple[list[float], list[float]]:
        """Loss and gradient norm of up to `steps` steps applied before `step`, oldest first."""
        first = max(1, step - min(steps, HISTORY_STEPS))
        begin, end = first % HISTORY_STEPS, step % HISTORY_STEPS
        if first < step and begin >= end:  # past the end of the ring
            older, newer = self._values[:, begin:].tolist(), self._values[:, :end].tolist()
            return older[0] + newer[0], older[1] + newer[1]
        losses, norms = self._values[:, begin:end].tolist()
        return losses, norms


def _whole(tensor: torch.Tensor, primary: bool) -> Box:
    shape = tuple(tensor.shape)
    return Box(shape, (0,) * len(shape), shape, primary)
