"""The first schema: jobs with their events, intents, attempts, incidents, checkpoints, series."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("desired", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("waiting", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("outcome_code", sa.String(length=64), nullable=True),
        sa.Column("outcome_message", sa.Text(), nullable=True),
        sa.Column("outcome_traceback", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("request_digest", sa.String(length=64), nullable=False),
        sa.Column("origin", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("incidents", sa.BigInteger(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("tokens_per_second", sa.Double(), nullable=True),
        sa.Column("intervals", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("guards", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("slow", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("faults_wanted", sa.BigInteger(), nullable=False),
        sa.Column("faults_injected", sa.BigInteger(), nullable=False),
        sa.Column("event_seq", sa.BigInteger(), nullable=False),
        sa.Column("log_lines", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("cursor_event", sa.BigInteger(), nullable=False),
        sa.Column("cursor_attempt", sa.BigInteger(), nullable=False),
        sa.Column("cursor_step", sa.BigInteger(), nullable=False),
        sa.Column("cursor_logs", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("lease_owner", sa.String(length=64), nullable=True),
        sa.Column("lease_token", sa.String(length=36), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("cleaned", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_jobs_idempotency_key")),
    )
    op.create_index(op.f("ix_jobs_name"), "jobs", ["name"], unique=False)
    op.create_index(op.f("ix_jobs_state"), "jobs", ["state"], unique=False)
    op.create_index("ix_jobs_work", "jobs", ["cleaned", "due_at", "lease_until"], unique=False)
    op.create_table(
        "injected_faults",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("fault", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("request_digest", sa.String(length=64), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("injected_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_injected_faults_job_id_jobs")
        ),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_injected_faults")),
    )
    op.create_table(
        "attempt_members",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("role", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_attempt_members_job_id_jobs")
        ),
        sa.PrimaryKeyConstraint("job_id", "attempt", "rank", name=op.f("pk_attempt_members")),
    )
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("mesh", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("standbys", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("restore", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("memory", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("joined", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("cause_incident", sa.BigInteger(), nullable=True),
        sa.Column("first_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("forming_at", sa.Double(), nullable=False),
        sa.Column("running_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_attempts")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("uri", sa.String(length=1024), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("tier", sa.String(length=16), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("mesh", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("metrics", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("saved_at", sa.Double(), nullable=False),
        sa.Column("verified_at", sa.Double(), nullable=True),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.Column("deleted_why", sa.Text(), nullable=True),
        sa.Column("bad", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_checkpoints_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "uri", name=op.f("pk_checkpoints")),
    )
    op.create_table(
        "digest_chunks",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("window", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("digests", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_digest_chunks_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "window", name=op.f("pk_digest_chunks")),
    )
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_events")),
    )
    op.create_table(
        "incidents",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_incidents_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_incidents")),
    )
    op.create_table(
        "intents",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("done_at", sa.Double(), nullable=True),
        sa.Column("times", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_intents_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "name", name=op.f("pk_intents")),
    )
    op.create_table(
        "log_chunks",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("first", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.Column("lines", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_log_chunks_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "first", name=op.f("pk_log_chunks")),
    )
    op.create_table(
        "metric_chunks",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("window", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rows", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_metric_chunks_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "window", "attempt", name=op.f("pk_metric_chunks")),
    )


def downgrade() -> None:
    op.drop_table("metric_chunks")
    op.drop_table("log_chunks")
    op.drop_table("intents")
    op.drop_table("incidents")
    op.drop_table("events")
    op.drop_table("digest_chunks")
    op.drop_table("checkpoints")
    op.drop_table("attempts")
    op.drop_table("attempt_members")
    op.drop_index("ix_jobs_work", table_name="jobs")
    op.drop_index(op.f("ix_jobs_state"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_name"), table_name="jobs")
    op.drop_table("jobs")
