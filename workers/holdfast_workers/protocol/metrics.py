"""The metrics of a step: the series that every job has, each declared once.

Everything else follows from `METRICS`: the columns of stored rows, the rows that outlines keep, the
names that users' metrics may not have, the dashboard's charts (by way of the OpenAPI document), the
table in `docs/operations/watch.md`. This module imports nothing of the project.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The metrics that every rank measures of its own step. The value of the whole step is their
    `fold` in rank order: `max`, because the slowest rank sets the pace; `sum` for a count."""

    loader_wait_s: float = field(default=0.0, metadata={"fold": max})
    fetch_wait_s: float = field(default=0.0, metadata={"fold": max})

    def measured(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FOLDS}


FOLDS: Mapping[str, Callable[[Iterable[float]], float]] = {
    measured.name: measured.metadata["fold"] for measured in fields(Measured)
}


@dataclass(frozen=True)
class Metric:
    """The description of an attribute of `StepRow` that is a series of the job."""

    name: str
    label: str
    """The heading of its chart; "": it says nothing as a curve, and has no chart."""
    unit: str
    description: str
    from_zero: bool = True
    """The axis of its chart begins at zero, so that heights can be compared."""
    outlined: bool = False
    """The outline of a stored chunk, read for charts of long runs, keeps its extremes."""
    charted: bool = False
    """So does each chart with more rows than points, whose grid becomes coarser by that."""
    derived_from: str = ""
    """The metric in whose rows its extremes are. It is then computed by readers, not stored."""


_DECLARED = (
    Metric("loss", "Loss", "", "mean over all targets of the step", from_zero=False, charted=True),
    Metric(
        "grad_norm",
        "Gradient norm",
        "",
        "norm of the whole gradient, before clipping",
        from_zero=False,
        charted=True,
    ),
    Metric(
        "tokens_per_second",
        "Tokens per second",
        "tokens/s",
        "`tokens` over `step_time_s`",
        derived_from="step_time_s",
    ),
    Metric("step_time_s", "Step time", "s", "time of the step", charted=True),
    Metric("lr", "Learning rate", "", "learning rate"),
    Metric(
        "loader_wait_s",
        "Waiting for data",
        "s",
        "the longest wait of any rank for data",
        outlined=True,
    ),
    Metric(
        "waiting_share",
        "Share of waiting ranks",
        "",
        "part of the step, from 0 to 1, in which a rank waited, on average: for others, in a "
        "pipeline's bubble, for data",
    ),
    Metric(
        "checkpoint_wait_s",
        "Waiting for checkpoints",
        "s",
        "wait of the reporting rank for its memory checkpoint",
        outlined=True,
    ),
    Metric("tokens", "", "tokens", "tokens that the whole world trained on in this step"),
    Metric("protected_step", "", "", "the newest step whose state every rank's partners hold too"),
    Metric("samples", "", "", "digest of the (position, sample) pairs that all ranks read"),
    Metric(
        "fetch_wait_s",
        "",
        "s",
        "the part of `loader_wait_s` for shards that a node had not fetched yet",
    ),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _DECLARED}
"""All metrics by name, in the order of the charts, which is that of the columns of stored rows: a
later version appends its metrics, and reads `null` of them in older rows."""
