"""How often a server looks, and how long it waits. Pure.

No operator has a reason to change these times, so they are no settings. They are fields, and not
constants beside their use, because tests look more often and wait shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field, with_config

Positive = Annotated[float, Field(gt=0)]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Pace:
    """Intervals and deadlines of one server; times in seconds."""

    reconcile_interval_s: Positive = 2.0
    """Between two polls of a job that changes its state, is watched by a live stream, or was
    requested from this server in the last 5 s; others are polled 2.5 times less often. Events do
    not wait."""
    polls_per_s: Positive = 30.0
    """Most polls of supervisors by one server. With more jobs than that allows, each job is polled
    less often; while the server is busy, all jobs are polled less often, so that requests stay
    fast. Jobs whose state is changing or that a user is watching share a second budget of the same
    size, those with an event a third."""
    claim_interval_s: Positive = 2.0
    """Between two searches for jobs that another process submitted, and for commands that came
    through another server."""
    queue_retry_s: Positive = 1.0
    """Between two admission checks of a queued job."""
    paused_look_s: Positive = 30.0
    """Between two checks of a paused job; a resume is noticed at once."""
    node_look_s: Positive = 5.0
    """Between two reads of the cluster's nodes, and of the nodes that are cordoned or in
    quarantine."""
    node_room_fresh_s: Positive = 600.0
    """A node that was too small for a job (shared memory, memory, processes) is not tried again by
    such jobs for so long; one that lacks software is not tried again by any job."""
    reap_interval_s: Positive = 30.0
    """Between two searches for remains of ended jobs on the cluster."""

    cluster_retry_s: Positive = 2.0
    """Between two attempts to reach an unreachable cluster."""
    error_retry_s: Positive = 1.0
    """First back-off after an error of a drive; it doubles."""
    error_retry_max_s: Positive = 30.0
    """Longest back-off."""
    release_retry_s: Positive = 0.5
    """Between two attempts to remove a job from the cluster."""

    supervisor_deadline_s: Positive = 15.0
    """A supervisor that has not answered for so long is requested again."""
    drain_deadline_s: Positive = 10.0
    """How long the next of the last rows and log lines of an ended job are waited for."""
    release_deadline_s: Positive = 60.0
    """A clean-up that takes longer is reported as overdue and retried less often."""
    stop_deadline_s: Positive = 10.0
    """How long an orderly shutdown of the server may take."""
    cluster_check_s: Positive = 40.0
    """How long the nodes have for the check of the cluster (`holdfast doctor --cluster`); a node
    that has not answered then is reported."""
    database_busy_s: Positive = 30.0
    """Longest wait for a lock of SQLite."""

    node_health_period_s: Positive = 1.0
    """Between two checks of an embedded cluster's node by Ray; also the time-out of each check."""
    node_health_failures: Annotated[int, Field(ge=1)] = 3
    """Failed checks in a row after which Ray declares such a node dead."""
