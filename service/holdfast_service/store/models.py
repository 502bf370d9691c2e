"""The tables. A job's row is the lock of all that belongs to it; rows of a step do not exist.

Series (metrics, digests, log lines) are kept in chunks that a key derived from the step or the
line number names, so that storing a report twice changes nothing. Times are Unix seconds.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from holdfast_service.store.change_numbers import NextChange

Json = dict[str, Any]


class Base(DeclarativeBase):
    # Named constraints, so that a later migration can address each of them on either database.
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


class Job(Base):
    """A job: what was asked for, what was observed, and how far its supervisor has been read."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)  # uuid7: ordered by creation
    name: Mapped[str] = mapped_column(String(64), index=True)
    spec: Mapped[Json]
    desired: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16), index=True)
    waiting: Mapped[Json | None]  # {resource, reason, since, until}
    outcome_code: Mapped[str | None] = mapped_column(String(64))
    outcome_message: Mapped[str | None] = mapped_column(Text)
    outcome_traceback: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    # A second submission with the same key is the first job; with another body, a conflict.
    idempotency_key: Mapped[str | None] = mapped_column(String(255), unique=True)
    request_digest: Mapped[str] = mapped_column(String(64))
    # What it begins with instead of its seed: {uri, step, what, job, held}; see origins.py.
    origin: Mapped[Json | None]
    code: Mapped[str | None] = mapped_column(String(80), index=True)  # of the user, by its digest

    step: Mapped[int] = mapped_column(default=0)
    steps: Mapped[int]
    attempt: Mapped[int] = mapped_column(default=0)
    incidents: Mapped[int] = mapped_column(default=0)
    loss: Mapped[float | None]
    tokens_per_second: Mapped[float | None]
    intervals: Mapped[Json] = mapped_column(default=dict)  # tier -> as its event told
    guards: Mapped[Json] = mapped_column(default=dict)  # {trips, ledger, recent}
    slow: Mapped[Json] = mapped_column(default=dict)  # rank -> as its event told

    # For lists, which read no series; see row_figures.py.
    owner: Mapped[str | None] = mapped_column(String(64))
    goodput: Mapped[float | None]
    productive_s: Mapped[float | None]  # None: the job is older than the figure
    held_s: Mapped[float] = mapped_column(default=0.0, server_default="0")
    held_since: Mapped[float | None]  # on the cluster since; None: it is not
    step_s: Mapped[float | None]  # between two steps, at the present pace
    told_at: Mapped[float | None]  # when its supervisor was last heard
    # Which writing of a job this is; grows. See change_numbers.py.
    changed: Mapped[int] = mapped_column(
        default=NextChange(), onupdate=NextChange(), server_default="0"
    )

    faults_wanted: Mapped[int] = mapped_column(default=0)  # number of the newest injected fault
    faults_injected: Mapped[int] = mapped_column(default=0)  # the newest its supervisor has taken
    event_seq: Mapped[int] = mapped_column(default=0)  # number of the newest event
    log_lines: Mapped[int] = mapped_column(default=0)  # number of the newest log line
    epoch: Mapped[int] = mapped_column(default=0)  # the supervisor's
    cursor_event: Mapped[int] = mapped_column(default=0)
    cursor_attempt: Mapped[int] = mapped_column(default=0)
    cursor_step: Mapped[int] = mapped_column(default=0)
    cursor_logs: Mapped[Json] = mapped_column(default=dict)

    own_metrics: Mapped[list[Any]] = mapped_column(default=list)  # names that its function told

    # Who may drive the job: the holder of the token, as long as its owner renews; see leases.py.
    lease_owner: Mapped[str | None] = mapped_column(String(64))
    lease_token: Mapped[str | None] = mapped_column(String(36))
    due_at: Mapped[float] = mapped_column(default=0.0)  # nobody looks at it before
    cleaned: Mapped[bool] = mapped_column(default=False)  # ended, and off the cluster

    __table_args__ = (
        Index("ix_jobs_work", "cleaned", "lease_owner", "due_at"),
        Index("ix_jobs_changed", "changed"),
        Index("ix_jobs_goodput", "goodput", "id"),
        Index("ix_jobs_search", "state", "name", "owner", "id"),  # all that filters look at
    )


class LeaseOwner(Base):
    """A reconciler that is there until `until`, by the database's clock; see leases.py."""

    __tablename__ = "lease_owners"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    until: Mapped[float]


class CodePackage(Base):
    """A folder of a user as a zip file; see code.py."""

    __tablename__ = "code_packages"

    id: Mapped[str] = mapped_column(String(80), primary_key=True)  # sha256:..., of its bytes
    content: Mapped[bytes] = mapped_column(LargeBinary)
    used_at: Mapped[float]


class Outbox(Base):
    """A message to the webhook that has not been taken yet; see webhooks.py."""

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
    """What is about to be done to the cluster: written before, marked done after."""

    __tablename__ = "intents"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    at: Mapped[float]
    done_at: Mapped[float | None]
    times: Mapped[int] = mapped_column(Integer, default=0)  # how often it took effect


class Attempt(Base):
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
    """A fault that a user wants; `injected_at` once the supervisor has taken it."""

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


class Incident(Base):
    __tablename__ = "incidents"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    opened_at: Mapped[float]
    closed_at: Mapped[float | None]
    data: Mapped[Json]  # as the supervisor's last word on it


class Node(Base):
    """A machine of the cluster, as `quarantine.node_name` names it; one that is gone stays."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(String(255), primary_key=True)
    host: Mapped[str] = mapped_column(Text)
    cpus: Mapped[float]
    gpus: Mapped[float]
    first_seen: Mapped[float]
    last_seen: Mapped[float]
    # What was decided about it last; see quarantine.Standings.
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    since: Mapped[float]
    until: Mapped[float | None]
    strikes: Mapped[int]
    findings: Mapped[list[Any]]  # of its health, as the last job on it told
    measured: Mapped[Json]  # device -> GB/s of its memory


class NodeTrouble(Base):
    """A node had a part in an incident."""

    __tablename__ = "node_troubles"

    node_id: Mapped[str] = mapped_column(String(255), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    incident: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    cause: Mapped[str] = mapped_column(String(32))
    at: Mapped[float]


class Checkpoint(Base):
    """A remote checkpoint; a deleted or bad one stays on record."""

    __tablename__ = "checkpoints"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    uri: Mapped[str] = mapped_column(String(1024), primary_key=True)
    step: Mapped[int]
    attempt: Mapped[int]
    tier: Mapped[str] = mapped_column(String(16))
    nbytes: Mapped[int]
    mesh: Mapped[Json]
    metrics: Mapped[Json]  # of its step, as its manifest tells
    saved_at: Mapped[float]
    verified_at: Mapped[float | None]  # when every byte was last read and found as it was saved
    deleted_at: Mapped[float | None]
    deleted_why: Mapped[str | None] = mapped_column(Text)
    bad: Mapped[str | None] = mapped_column(Text)


class MetricChunk(Base):
    """Rows of one attempt whose steps fall in one window (series.WINDOW steps)."""

    __tablename__ = "metric_chunks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    window: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    rows: Mapped[Json]  # step -> values in the order of series.COLUMNS
    outline: Mapped[Json | None]  # what long looks read instead of `rows`; see outlines.py


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
    """What the ranks took, in `rank_series.BUCKETS` buckets of `width_s` seconds; all chunks of a
    job have the same width. Little-endian float16 seconds; NaN: no step."""

    __tablename__ = "rank_chunks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    place: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    width_s: Mapped[int]
    ranks: Mapped[int]
    counts: Mapped[list[Any]]  # of steps, by bucket
    steps: Mapped[bytes] = mapped_column(LargeBinary)  # by bucket
    compute: Mapped[bytes] = mapped_column(LargeBinary)  # by bucket, and by rank in it


class RankStates(Base):
    """The ranks of a job as last seen; see rank_series.store_states."""

    __tablename__ = "rank_states"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    at: Mapped[float]
    attempt: Mapped[int]
    seen: Mapped[Json]  # rank -> [step, phase, seconds since its beacon changed, compute seconds]
