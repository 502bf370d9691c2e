"""The early stop's part of a rank's state: the best evaluation, and the number of those since.

It is identical on every rank and on any mesh, since it depends on agreed results alone. It is a
part of the state, so after any restore the same step decides as before. It changes only after a
step is applied and evaluated, and before the state of that step is copied.
"""

from __future__ import annotations

import math

import torch
import xxhash

from holdfast_workers.protocol.findings import EarlyStop
from holdfast_workers.spec import EvaluateSpec
from holdfast_workers.state.rank_state import ShardBox, StateTensor


class EvaluationMemory:
    """What `evaluate.stop` needs to know of former evaluations. Without it, this never changes."""

    def __init__(self, spec: EvaluateSpec) -> None:
        self.subject = 0
        """Digest of what is evaluated, of 52 bits; see `subject_of`. Values of another subject, as
        `init_from` may have brought, are forgotten."""
        self._spec = spec
        self._values = torch.zeros(4, dtype=torch.float64)
        """The best value, its step, the evaluations since, and the subject of these."""
        self.reset()

    def pieces(self, *, primary: bool) -> list[StateTensor]:
        """Its tensor as a part of the state. `primary` is true on one rank of the world."""
        box = ShardBox((4,), (0,), (4,), primary)
        return [StateTensor("evaluate.best", self._values, box, weight=False)]

    def reset(self) -> None:
        """Set the state of step 0."""
        self._set(_NONE)

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """`step` has been evaluated with these metrics; one that is not finite is missing."""
        stop = self._spec.stop
        if stop is None or not self._spec.counts_for_stop(step):
            return
        best, best_step, since = self._known()
        value = metrics.get(stop.metric, math.inf)
        better = value < best
        found = (value, step, 0) if better else (best, best_step, since + 1)
        self._set((*found, self.subject))

    def early_stop(self) -> EarlyStop | None:
        """Why training ends with the present state; None: it goes on."""
        stop = self._spec.stop
        best, best_step, since = self._known()
        if stop is None or since < stop.patience:
            return None
        known = best if math.isfinite(best) else None
        return EarlyStop(stop.metric, int(since), known, int(best_step))

    def _known(self) -> tuple[float, float, float]:
        *found, subject = self._values.tolist()
        best, best_step, since = found if subject == self.subject else _NONE[:3]
        return best, best_step, since

    def _set(self, values: tuple[float, ...]) -> None:
        self._values.copy_(torch.tensor(values, dtype=torch.float64))


def subject_of(spec: EvaluateSpec, documents: str, samples: int) -> int:
    """Digest, of 52 bits, of what the values of `stop.metric` depend on besides the state:
    `documents`, their fingerprint, and the number of samples that are read."""
    metric = None if spec.stop is None else spec.stop.metric
    named = f"{metric} {spec.weights} {documents} {samples}"
    return xxhash.xxh3_64_intdigest(named.encode()) >> 12


_NONE = (math.inf, 0.0, 0.0, 0.0)
"""Before the first evaluation."""
