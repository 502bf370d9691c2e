"""The life of a job: its states, what the user may want, and the one table of legal transitions.

Pure values. Whoever changes a job's state asks :func:`require` first, inside the transaction that
writes the change; nothing else in the project knows which state may follow which. An ended job
never changes again (P7), so a terminal state has no successor in the table.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What a supervisor says of its job; the reconciler maps it to the job's state."""

    STARTING = "STARTING"  # placement, agents, first rendezvous
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    FINISHING = "FINISHING"  # last checkpoint under way
    ENDED = "ENDED"


class State(StrEnum):
    """What was observed of a job."""

    QUEUED = "QUEUED"  # accepted; nothing of it is on the cluster yet
    STARTING = "STARTING"  # its supervisor was asked for; no step yet
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"  # between a fault and the first new step
    RESIZING = "RESIZING"
    PAUSING = "PAUSING"  # makes and saves a last step, then leaves the cluster
    PAUSED = "PAUSED"  # nothing of it is on the cluster; it goes on where it was saved
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
    """What the user wants of a job."""

    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"


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

_NEVER: frozenset[State] = frozenset()
# A supervisor may have ended its job before anybody looked again, so every state in which it
# exists leads to every terminal state: what happened is recorded, also after a cancel came late.
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
    # Back to RUNNING where nothing of it could be saved: the work is worth more than the pause.
    State.PAUSING: frozenset({State.PAUSED, State.RUNNING, State.CANCELLING} | TERMINAL),
    State.PAUSED: frozenset({State.QUEUED, State.CANCELLED}),
    State.CANCELLING: TERMINAL,
    State.CANCELLED: _NEVER,
    State.SUCCEEDED: _NEVER,
    State.FAILED: _NEVER,
}

_PHASE_MEANS: dict[Phase, State | None] = {
    Phase.STARTING: State.STARTING,
    Phase.RUNNING: State.RUNNING,
    Phase.RECOVERING: State.RECOVERING,
    Phase.FINISHING: State.RUNNING,
    Phase.ENDED: None,  # the ENDED event carries the outcome; the phase alone says too little
}


class ForbiddenTransition(Exception):
    """Somebody tried to move a job to a state that may not follow its present one."""

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


def observed(state: State, phase: Phase) -> State | None:
    """The state a job in `state` moves to when its supervisor reports `phase`; None: stays.

    A phase that cannot follow is no error: a restarted supervisor says STARTING of a job long
    since running, and a cancelled one reports RUNNING until the cancel has reached it. One that is
    to pause does so too: only its supervisor's events lead out of that.
    """
    meant = None if state is State.PAUSING else _PHASE_MEANS[phase]
    if meant is None or meant == state or not may(state, meant):
        return None
    return meant
