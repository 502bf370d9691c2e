"""The lifecycle of a job: its states, the states users can request, and the table of transitions.

Pure values. Each change of a job's state calls :func:`require` first, inside the transaction that
writes the change; no other module defines which state may follow which. An ended job never changes
again (P7), so a terminal state has no successor in the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The phase that a supervisor reports; the reconciler maps it to the job's state."""

    STARTING = "STARTING"  # placement, agents, first rendezvous
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    RESIZING = "RESIZING"
    FINISHING = "FINISHING"  # the last checkpoint is being written
    ENDED = "ENDED"


START_WAIT = "start"
"""The resource that a job waits for while its present attempt starts."""
SUPERVISOR_START = "its supervisor to start"
"""The reason of that wait before an attempt can begin."""


DATA_WAIT = "data"
"""The resource that a job waits for while what it reads is prepared, or ranks have no samples."""

STOPPED_EARLY = "stopped_early"
"""The code of a success before the last step, by `evaluate.stop`."""


class State(StrEnum):
    """The observed state of a job."""

    QUEUED = "QUEUED"  # accepted; it has nothing on the cluster yet
    STARTING = "STARTING"  # its supervisor was requested; no step yet
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"  # between a fault and the first new step
    RESIZING = "RESIZING"  # between a change of the mesh, without a fault, and the first new step
    PAUSING = "PAUSING"  # computes and saves a last step, then leaves the cluster
    PAUSED = "PAUSED"  # it has nothing on the cluster; it continues from its last checkpoint
    CANCELLING = "CANCELLING"  # the user cancelled; the workers may still be alive
    CANCELLED = "CANCELLED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL

    @property
    def on_cluster(self) -> bool:
        """Whether a supervisor is expected to exist, and resources to be held."""
        return self in ON_CLUSTER


class Desired(StrEnum):
    """The state that the user requested."""

    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"


class StopKind(StrEnum):
    """Why a job is to stop before its last step."""

    CANCEL = "cancel"
    PAUSE = "pause"


@dataclass(frozen=True)
class StopOrder:
    """Order to stop a job after its last state is in the remote tier, or at `deadline`
    (`time.time()`) without it. A deadline in the past means at once."""

    kind: StopKind
    reason: str
    deadline: float


TERMINAL = frozenset({State.CANCELLED, State.SUCCEEDED, State.FAILED})
ON_CLUSTER = frozenset(
    {
        State.STARTING,
        State.RUNNING,
        State.RECOVERING,
        State.RESIZING,
        State.PAUSING,
        State.CANCELLING,
    }
)

_NONE: frozenset[State] = frozenset()
# A supervisor may end its job between two polls, so every state in which a supervisor exists leads
# to every terminal state: the outcome is recorded as it happened, also if a cancel came too late.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STARTING, State.PAUSED, State.CANCELLED, State.FAILED}),
    State.STARTING: frozenset(
        {State.RUNNING, State.RECOVERING, State.PAUSING, State.CANCELLING} | TERMINAL
    ),
    State.RUNNING: frozenset(
        {State.RECOVERING, State.RESIZING, State.PAUSING, State.CANCELLING} | TERMINAL
    ),
    State.RECOVERING: frozenset(
        {State.RUNNING, State.RESIZING, State.PAUSING, State.CANCELLING} | TERMINAL
    ),
    State.RESIZING: frozenset(
        {State.RUNNING, State.RECOVERING, State.PAUSING, State.CANCELLING} | TERMINAL
    ),
    # Back to RUNNING where no checkpoint could be saved: the work is worth more than the pause.
    State.PAUSING: frozenset({State.PAUSED, State.RUNNING, State.CANCELLING} | TERMINAL),
    State.PAUSED: frozenset({State.QUEUED, State.CANCELLED}),
    State.CANCELLING: TERMINAL,
    State.CANCELLED: _NONE,
    State.SUCCEEDED: _NONE,
    State.FAILED: _NONE,
}

_STATE_OF_PHASE: dict[Phase, State | None] = {
    Phase.STARTING: State.STARTING,
    Phase.RUNNING: State.RUNNING,
    Phase.RECOVERING: State.RECOVERING,
    Phase.RESIZING: State.RESIZING,
    Phase.FINISHING: State.RUNNING,
    Phase.ENDED: None,  # the ENDED event carries the outcome; the phase alone is not enough
}


class ForbiddenTransition(Exception):
    """A job cannot change from its present state to the requested one."""

    def __init__(self, old: State, new: State) -> None:
        super().__init__(f"a job that is {old} cannot become {new}")
        self.old = old
        self.new = new


def may(old: State, new: State) -> bool:
    return new in TRANSITIONS[old]


def require(old: State, new: State) -> None:
    """Raise :class:`ForbiddenTransition` unless `new` may follow `old`."""
    if not may(old, new):
        raise ForbiddenTransition(old, new)


def state_after_report(state: State, phase: Phase) -> State | None:
    """The state a job in `state` moves to when its supervisor reports `phase`; None: no change.

    A phase that cannot follow is not an error: a restarted supervisor reports STARTING for a job
    that has long been running, and the supervisor of a cancelled job reports RUNNING until it gets
    the cancel. The same holds for a pausing job: only its supervisor's events end that state.
    """
    new = None if state is State.PAUSING else _STATE_OF_PHASE[phase]
    if new is None or new == state or not may(state, new):
        return None
    return new
