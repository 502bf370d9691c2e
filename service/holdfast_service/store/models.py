"""The tables. A job's row is the lock for everything that belongs to the job.

No table has a row per step: series (metrics, digests, log lines) are stored in chunks whose keys
derive from the step or the line number, so storing a report twice changes nothing. Times are Unix
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    false,
)
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute, Mapped, mapped_column

from holdfast_service.job_model.operations import ACTIVE
from holdfast_service.store.change_numbers import NextChange

Json = dict[str, Any]


class Base(DeclarativeBase):
    # Constraints have names, so that a later migration can address them on both databases.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  (read by the declarative machinery)
        int: BigInteger,
        float: Double,
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
    }


class Leased:
    """A row that one server at a time works on, until nothing is left to do; see leases.py."""

    id: Mapped[str] = mapped_column(String(36), primary_key=True)  # uuid7: ordered by creation
    lease_owner: Mapped[str | None] = mapped_column(String(64))  # valid while it renews its time
    lease_token: Mapped[str | None] = mapped_column(String(36))
    due_at: Mapped[float] = mapped_column(default=0.0)  # no server works on it before

    @classmethod
    def unfinished(cls) -> ColumnElement[bool]:
        """Whether there is work left. A finished row is claimed no more, and keeps its lease."""
        raise NotImplementedError

    @classmethod
    def claim_order(cls) -> Sequence[InstrumentedAttribute[Any]]:
        """The first of these is claimed first."""
        return cls.due_at, cls.id


class JobRecord(Leased, Base):
    """A job: the requested spec, the observed state, the cursors into its supervisor's reports."""

    __tablename__ = "jobs"

    name: Mapped[str] = mapped_column(String(64), index=True)
    spec: Mapped[Json]
    desired: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16), index=True)
    waiting: Mapped[Json | None]  # {resource, reason, since, until, reserved}
    # Since when it waits to run; 0: it has run since, or its user has paused it.
    queued_at: Mapped[float] = mapped_column(default=0.0)
    # Ids of the nodes that were kept for jobs before it when it was admitted.
    kept_off: Mapped[list[Any] | None]
    outcome_code: Mapped[str | None] = mapped_column(String(64))
    outcome_message: Mapped[str | None] = mapped_column(Text)
    outcome_traceback: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    # A second submission with the same key returns the first job; a different body is a conflict.
    # Null again once the key has expired.
    idempotency_key: Mapped[str | None] = mapped_column(String(255), unique=True)
    request_digest: Mapped[str] = mapped_column(String(64))
    # The initial state, unless seeded: {uri, step, what, job, held}; see services/init_sources.py.
    origin: Mapped[Json | None]
    code: Mapped[str | None] = mapped_column(
        String(80), index=True
    )  # id of the user's code package

    step: Mapped[int | None]  # None: a program has reported none yet
    steps: Mapped[int]  # 0: not known, of a user's program
    attempt: Mapped[int] = mapped_column(default=0)
    incidents: Mapped[int] = mapped_column(default=0)
    loss: Mapped[float | None]
    tokens_per_second: Mapped[float | None]
    intervals: Mapped[Json] = mapped_column(default=dict)  # tier -> fields of its event
    guards: Mapped[Json] = mapped_column(default=dict)  # {trips, ledger, recent}
    slow: Mapped[Json] = mapped_column(default=dict)  # rank -> fields of its event

    # For lists, which read no series; see job_row_stats.py.
    owner: Mapped[str | None] = mapped_column(String(64))
    goodput: Mapped[float | None]
    productive_s: Mapped[float] = mapped_column(default=0.0)
    held_s: Mapped[float] = mapped_column(default=0.0)
    starting_s: Mapped[float] = mapped_column(default=0.0)  # before the first step of each stay
    held_since: Mapped[float | None]  # up to here `held_s` counts; None: not on the cluster
    step_s: Mapped[float | None]  # seconds per step at the present pace
    data_wait: Mapped[float] = mapped_column(default=0.0)  # see job_row_stats.update_stats
    fetch_wait: Mapped[float] = mapped_column(default=0.0)
    told_at: Mapped[float | None]  # time of the supervisor's last report
    # Change number of the last write; only grows. See change_numbers.py.
    changed: Mapped[int] = mapped_column(default=NextChange(), onupdate=NextChange())

    wanted_nodes: Mapped[int | None]  # most nodes that may train, as the user ordered
    priority: Mapped[int] = mapped_column(default=0)  # as in the spec, for the order of the queue
    generation: Mapped[int] = mapped_column(default=1)  # counts the changes by users
    build: Mapped[str | None] = mapped_column(String(64))  # of Holdfast, that its ranks run
    program: Mapped[Json | None]  # fields of its newest event program.attached
    packages: Mapped[list[Any] | None]  # exact requirements; None: not known yet
    faults_wanted: Mapped[int] = mapped_column(default=0)  # number of the newest injected fault
    faults_injected: Mapped[int] = mapped_column(
        default=0
    )  # the newest that its supervisor accepted
    event_seq: Mapped[int] = mapped_column(default=0)  # number of the newest event
    log_lines: Mapped[int] = mapped_column(default=0)  # number of the newest log line
    epoch: Mapped[int] = mapped_column(default=0)  # the supervisor's
    cursor_event: Mapped[int] = mapped_column(default=0)
    cursor_attempt: Mapped[int] = mapped_column(default=0)
    cursor_step: Mapped[int] = mapped_column(default=0)
    cursor_logs: Mapped[Json] = mapped_column(default=dict)

    own_metrics: Mapped[list[Any]] = mapped_column(default=list)  # names reported by its function

    cleaned: Mapped[bool] = mapped_column(default=False)  # ended and released from the cluster

    __table_args__ = (
        Index("ix_jobs_work", "cleaned", "lease_owner", "due_at"),
        Index("ix_jobs_changed", "changed"),
        Index("ix_jobs_goodput", "goodput", "productive_s", "starting_s", "id"),
        Index("ix_jobs_search", "state", "name", "owner", "id"),  # covers all filters
    )

    @classmethod
    def unfinished(cls) -> ColumnElement[bool]:
        return cls.cleaned == false()


QUEUE_ORDER = (JobRecord.priority.desc(), JobRecord.id)
"""The order in which queued jobs start, as far as they fit."""


class RemovedJob(Base):
    """What stays of a removed job; see services/job_removal.py."""

    __tablename__ = "removed_jobs"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    removed_at: Mapped[float]
    answer: Mapped[Json]  # to the user who removed it
    # Totals over all jobs must not fall.
    productive_s: Mapped[float]
    held_s: Mapped[float]
    incidents: Mapped[list[Any]]  # closed ones
    # Greater than that of every job before it, so that change numbers are never used again.
    changed: Mapped[int] = mapped_column(default=NextChange(), index=True)


class Installation(Base):
    """The one row that says which installation this database belongs to; see installation.py."""

    __tablename__ = "installation"

    one: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # always 1
    id: Mapped[str] = mapped_column(String(32))
    key_fingerprint: Mapped[str | None] = mapped_column(String(64))


class LeaseOwner(Base):
    """A holder of leases that is alive until `until`, by the database's clock; see leases.py."""

    __tablename__ = "lease_owners"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    until: Mapped[float]


class CodePackage(Base):
    """A user's code folder as a zip file; see services/code_packages.py."""

    __tablename__ = "code_packages"

    id: Mapped[str] = mapped_column(String(80), primary_key=True)  # sha256:<digest of the content>
    content: Mapped[bytes] = mapped_column(LargeBinary)
    used_at: Mapped[float]


class Outbox(Base):
    """A webhook message that is not delivered yet; see reconcile/webhook_sender.py."""

    __tablename__ = "outbox"

    id: Mapped[str] = mapped_column(String(80), primary_key=True)  # <job>:<number of the event>
    at: Mapped[float]
    message: Mapped[Json]
    due_at: Mapped[float] = mapped_column(index=True)
    tries: Mapped[int] = mapped_column(default=0)


class Event(Base):
    __tablename__ = "events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(String(64))
    data: Mapped[Json]

    __table_args__ = (Index("ix_events_kind", "job_id", "kind", "seq"),)


class Intent(Base):
    """An intended effect outside of the database: written before the call and marked done after
    it."""

    __tablename__ = "intents"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    at: Mapped[float]
    done_at: Mapped[float | None]
    times: Mapped[int] = mapped_column(Integer, default=0)  # number of times it took effect


class AttemptRow(Base):
    __tablename__ = "attempts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str] = mapped_column(String(16))  # forming, running, ended
    mesh: Mapped[Json]
    world_size: Mapped[int]
    standbys: Mapped[list[Any]]
    restore: Mapped[Json]
    memory: Mapped[Json | None]
    joined: Mapped[Json]
    cause_incident: Mapped[int | None]
    first_step: Mapped[int | None]
    last_step: Mapped[int | None]
    forming_at: Mapped[float]
    running_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    reason: Mapped[str | None] = mapped_column(Text)


class InjectedFault(Base):
    """A fault requested by a user; `injected_at` is set once the supervisor has accepted it."""

    __tablename__ = "injected_faults"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    fault: Mapped[Json]
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    request_digest: Mapped[str] = mapped_column(String(64))
    requested_at: Mapped[float]
    injected_at: Mapped[float | None]


class AttemptMember(Base):
    __tablename__ = "attempt_members"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    worker: Mapped[str] = mapped_column(Text)
    agent: Mapped[str] = mapped_column(Text)
    node_id: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int | None]
    role: Mapped[str] = mapped_column(Text)


class IncidentRow(Base):
    __tablename__ = "incidents"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    opened_at: Mapped[float]
    closed_at: Mapped[float | None]
    data: Mapped[Json]  # the supervisor's latest report of it


class NodeRow(Base):
    """A machine of the cluster, named by `quarantine.node_name`. Rows of removed machines stay."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(String(255), primary_key=True)
    host: Mapped[str] = mapped_column(Text)
    cpus: Mapped[float]
    gpus: Mapped[float]
    head: Mapped[bool] = mapped_column(default=False)  # the head of the cluster runs on it
    first_seen: Mapped[float]
    last_seen: Mapped[float]
    # The last decision about the node; see policy/quarantine.py.
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    since: Mapped[float]
    until: Mapped[float | None]
    strikes: Mapped[int]
    findings: Mapped[list[Any]]  # health findings reported by the last job on it
    measured: Mapped[Json]  # device -> memory bandwidth in GB/s


class NodeTrouble(Base):
    """An incident that was attributed to a node."""

    __tablename__ = "node_troubles"

    node_id: Mapped[str] = mapped_column(String(255), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    incident: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    cause: Mapped[str] = mapped_column(String(32))
    at: Mapped[float]


class Checkpoint(Base):
    """A remote checkpoint; rows of deleted or bad checkpoints stay."""

    __tablename__ = "checkpoints"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    uri: Mapped[str] = mapped_column(String(1024), primary_key=True)
    step: Mapped[int]
    attempt: Mapped[int]
    tier: Mapped[str] = mapped_column(String(16))
    nbytes: Mapped[int]
    mesh: Mapped[Json]
    metrics: Mapped[Json]  # metrics of its step, from its manifest
    saved_at: Mapped[float]
    verified_at: Mapped[float | None]  # when every byte was last read and verified
    deleted_at: Mapped[float | None]
    deleted_why: Mapped[str | None] = mapped_column(Text)
    bad: Mapped[str | None] = mapped_column(Text)


class Operation(Leased, Base):
    """Long work that a user requested; see operations/."""

    __tablename__ = "operations"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    uri: Mapped[str] = mapped_column(String(1024))  # of the checkpoint
    step: Mapped[int]
    names: Mapped[str | None] = mapped_column(String(16))  # of the parameters in an export
    weights: Mapped[str | None] = mapped_column(String(16))  # which of them an export has
    state: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float]
    started_at: Mapped[float | None]  # the last time: a server that dies is replaced
    ended_at: Mapped[float | None]
    expires_at: Mapped[float | None]
    done_bytes: Mapped[int] = mapped_column(default=0)
    total_bytes: Mapped[int | None]
    bad: Mapped[str | None] = mapped_column(Text)
    content: Mapped[Json | None]  # {name, nbytes, digest}
    error: Mapped[Json | None]  # a problem document
    starts: Mapped[int] = mapped_column(default=0)

    __table_args__ = (Index("ix_operations_work", "state", "lease_owner", "due_at"),)

    @classmethod
    def unfinished(cls) -> ColumnElement[bool]:
        return cls.state.in_(ACTIVE)

    @classmethod
    def claim_order(cls) -> Sequence[InstrumentedAttribute[Any]]:
        """The order of claims: by age, also of what a server has begun and not ended."""
        return (cls.id,)


class MetricChunk(Base):
    """The metric rows of one attempt whose steps are in one window of series.WINDOW steps."""

    __tablename__ = "metric_chunks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    window: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    rows: Mapped[Json]  # step -> values in the order of series.COLUMNS
    outline: Mapped[Json | None]  # summary of `rows` for long charts; see downsampling.py


class DigestChunk(Base):
    __tablename__ = "digest_chunks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    window: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digests: Mapped[Json]  # step -> hex


class LogChunk(Base):
    """Log lines in order of arrival; `first` is the number of the first line."""

    __tablename__ = "log_chunks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    first: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    last: Mapped[int]
    lines: Mapped[list[Any]]


class RankChunk(Base):
    """Step and compute times of the ranks in `rank_series.BUCKETS` buckets of `width_s` seconds;
    all chunks of a job have the same width. Little-endian float16 seconds; NaN: no step."""

    __tablename__ = "rank_chunks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    place: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    width_s: Mapped[int]
    ranks: Mapped[int]
    counts: Mapped[list[Any]]  # number of steps, by bucket
    steps: Mapped[bytes] = mapped_column(LargeBinary)  # step time, by bucket
    compute: Mapped[bytes] = mapped_column(LargeBinary)  # compute time, by bucket and rank


class RankStates(Base):
    """The last reported state of each rank of a job; see rank_series.store_states."""

    __tablename__ = "rank_states"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    at: Mapped[float]
    attempt: Mapped[int]
    seen: Mapped[Json]  # rank -> [step, phase, seconds since its beacon changed, compute seconds]
