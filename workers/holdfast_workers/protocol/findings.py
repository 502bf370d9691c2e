"""Findings as they are reported: of health probes, of compared replicas, and of tripped guards.

Values only; the rooms `health/`, `state/` and `training/` decide what counts as a finding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Level(StrEnum):
    """The severity of a finding, mildest first."""

    NOTE = "note"  # for information; needs no action
    SUSPECT = "suspect"  # may get worse, or explain a fault; the node stays in use
    UNFIT = "unfit"  # no rank should run here while another node is available


ROOM = "room"
"""The probe whose findings concern one job: the node is too small for it, and fit for others."""

SOFTWARE = "software"
"""The probe whose findings say that no agent can run on the node, for lack of software."""


@dataclass(frozen=True)
class HealthFinding:
    probe: str  # "accelerator", "host", "network", "preflight", "exchange", "room", "software"
    kind: str  # one of the probe's closed set of findings
    level: Level
    what: str  # a message with the numbers
    where: str = ""  # device, folder or interface
    code: int | None = None  # XID number
    lost: bool = False  # a resource that ranks need is gone: no rank can continue here
    needed: int = 0  # of probe "room": bytes, or a number; `there` is what the node has
    there: int = 0

    @property
    def key(self) -> tuple[str, str, str, str, int | None]:
        """The identity of a finding, whatever its numbers are."""
        return (self.probe, self.kind, self.level, self.where, self.code)


def messages_of(findings: Iterable[HealthFinding]) -> str:
    """The messages of the findings that make a node unfit, as one line; "": it is fit."""
    return "; ".join(finding.what for finding in findings if finding.level is Level.UNFIT)


@dataclass(frozen=True)
class HealthReport:
    """The present findings about a node. `number` grows with each change; 0: not checked yet."""

    number: int = 0
    findings: tuple[HealthFinding, ...] = ()
    measured: dict[str, float] = field(default_factory=dict)
    """Memory bandwidth by device, in GB/s."""


@dataclass(frozen=True)
class ReplicaFinding:
    """The corruption that all ranks of an attempt detected in one agreement."""

    attempt: int
    step: int
    """The state that was compared; every rank was at it."""
    bad_from: int
    """The first step whose state, as computed so far, may not be used; nor may a later one's."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks that should hold the same state but do not."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digests of those ranks."""
    changed: tuple[int, ...] = ()
    """Ranks whose own parameters changed between two steps."""


@dataclass(frozen=True)
class EarlyStop:
    """Why a job ends before its last step: its model has stopped improving."""

    metric: str
    evaluations: int
    """The evaluations since the best one; none of them is better."""
    best: float | None = None
    """None: no evaluation was finite."""
    best_step: int = 0

    @property
    def reason(self) -> str:
        """`eval_loss has not improved on 2.31 of step 80 in 4 evaluations`"""
        count = f"{self.evaluations} evaluation{'' if self.evaluations == 1 else 's'}"
        if self.best is None:
            return f"{self.metric} was not finite in {count}"
        return (
            f"{self.metric} has not improved on {self.best:.4g} of step {self.best_step} in {count}"
        )


class GuardKind(StrEnum):
    NONFINITE = "nonfinite"
    LOSS_SPIKE = "loss_spike"
    GRAD_NORM_SPIKE = "grad_norm_spike"


class GuardAction(StrEnum):
    """The actions after a trip, from the mildest to the most severe."""

    REPORT = "report"  # the step is applied nevertheless
    RETRY = "retry"  # a second computation was finite; the step is computed from the same data
    SKIP = "skip"  # the step is computed again from the next window, on all ranks at once
    ROLLBACK = "rollback"  # training resumes from an older step, without the windows since then
    STOP = "stop"  # the job ends


@dataclass(frozen=True)
class TripReport:
    """A tripped guard: the values, the bounds that they exceeded, and the action. In a report, a
    number that was not finite is None."""

    kind: GuardKind
    step: int
    window: int
    decision: GuardAction
    why: str
    value: float | None = None
    """The loss for a loss spike, otherwise the gradient norm."""
    loss: float | None = None
    grad_norm: float | None = None
    middle: float | None = None
    """The median of the steps before a spike."""
    limit: float | None = None
    """The highest value that is not a spike."""
    skipped: tuple[int, int] | None = None
    """The half-open range of windows that is added to the ledger."""
    back_to: int | None = None
    """The last step that a rollback keeps."""
    ranks: tuple[int, ...] = ()
    """Ranks on which a non-finite value began; () if unknown."""
    layer: str | None = None
    """The module in whose output or gradient it began."""
    what: str | None = None
    """ "output", "gradient", "loss", or "state"."""
    micro_batch: int | None = None
