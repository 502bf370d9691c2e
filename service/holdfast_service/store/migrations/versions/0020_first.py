"""The first schema: jobs and their histories, nodes, checkpoints, series.

Its number is 0020 because unreleased versions wrote the revisions up to 0019. A database of one of
those is refused; see `store/migrate.py`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _jobs()
    _histories()
    _nodes_and_checkpoints()
    _operations()
    _series()


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("desired", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("waiting", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("kept_off", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("outcome_code", sa.String(length=64), nullable=True),
        sa.Column("outcome_message", sa.Text(), nullable=True),
        sa.Column("outcome_traceback", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("request_digest", sa.String(length=64), nullable=False),
        sa.Column("origin", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("code", sa.String(length=80), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("incidents", sa.BigInteger(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("tokens_per_second", sa.Double(), nullable=True),
        sa.Column("intervals", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("guards", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("slow", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=True),
        sa.Column("goodput", sa.Double(), nullable=True),
        sa.Column("productive_s", sa.Double(), nullable=False),
        sa.Column("held_s", sa.Double(), nullable=False),
        sa.Column("starting_s", sa.Double(), nullable=False),
        sa.Column("held_since", sa.Double(), nullable=True),
        sa.Column("step_s", sa.Double(), nullable=True),
        sa.Column("data_wait", sa.Double(), nullable=False),
        sa.Column("fetch_wait", sa.Double(), nullable=False),
        sa.Column("told_at", sa.Double(), nullable=True),
        sa.Column("changed", sa.BigInteger(), nullable=False),
        sa.Column("wanted_nodes", sa.BigInteger(), nullable=True),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("build", sa.String(length=64), nullable=True),
        sa.Column("program", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("packages", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("faults_wanted", sa.BigInteger(), nullable=False),
        sa.Column("faults_injected", sa.BigInteger(), nullable=False),
        sa.Column("event_seq", sa.BigInteger(), nullable=False),
        sa.Column("log_lines", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("cursor_event", sa.BigInteger(), nullable=False),
        sa.Column("cursor_attempt", sa.BigInteger(), nullable=False),
        sa.Column("cursor_step", sa.BigInteger(), nullable=False),
        sa.Column("cursor_logs", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("own_metrics", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("lease_owner", sa.String(length=64), nullable=True),
        sa.Column("lease_token", sa.String(length=36), nullable=True),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("cleaned", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_jobs_idempotency_key")),
    )
    op.create_index(op.f("ix_jobs_name"), "jobs", ["name"])
    op.create_index(op.f("ix_jobs_state"), "jobs", ["state"])
    op.create_index(op.f("ix_jobs_code"), "jobs", ["code"])
    op.create_index("ix_jobs_work", "jobs", ["cleaned", "lease_owner", "due_at"])
    op.create_index("ix_jobs_changed", "jobs", ["changed"])
    op.create_index("ix_jobs_goodput", "jobs", ["goodput", "productive_s", "starting_s", "id"])
    op.create_index("ix_jobs_search", "jobs", ["state", "name", "owner", "id"])
    op.create_table(
        "removed_jobs",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("removed_at", sa.Double(), nullable=False),
        sa.Column("answer", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("productive_s", sa.Double(), nullable=False),
        sa.Column("held_s", sa.Double(), nullable=False),
        sa.Column("incidents", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("changed", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_removed_jobs")),
    )
    op.create_index(op.f("ix_removed_jobs_changed"), "removed_jobs", ["changed"])
    op.create_table(
        "installation",
        sa.Column("one", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("key_fingerprint", sa.String(length=64), nullable=True),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_installation")),
    )
    op.create_table(
        "lease_owners",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lease_owners")),
    )
    op.create_table(
        "code_packages",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_code_packages")),
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("message", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
    )
    op.create_index(op.f("ix_outbox_due_at"), "outbox", ["due_at"])


def _histories() -> None:
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
    op.create_index("ix_events_kind", "events", ["job_id", "kind", "seq"])
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
        "incidents",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_incidents_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_incidents")),
    )


def _nodes_and_checkpoints() -> None:
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("cpus", sa.Double(), nullable=False),
        sa.Column("gpus", sa.Double(), nullable=False),
        sa.Column("head", sa.Boolean(), nullable=False),
        sa.Column("first_seen", sa.Double(), nullable=False),
        sa.Column("last_seen", sa.Double(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("until", sa.Double(), nullable=True),
        sa.Column("strikes", sa.BigInteger(), nullable=False),
        sa.Column("findings", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("measured", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
    )
    op.create_table(
        "node_troubles",
        sa.Column("node_id", sa.String(length=255), nullable=False),
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("incident", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("cause", sa.String(length=32), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_node_troubles_job_id_jobs")),
        sa.PrimaryKeyConstraint("node_id", "job_id", "incident", name=op.f("pk_node_troubles")),
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


def _operations() -> None:
    op.create_table(
        "operations",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("uri", sa.String(length=1024), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("names", sa.String(length=16), nullable=True),
        sa.Column("weights", sa.String(length=16), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("done_bytes", sa.BigInteger(), nullable=False),
        sa.Column("total_bytes", sa.BigInteger(), nullable=True),
        sa.Column("bad", sa.Text(), nullable=True),
        sa.Column("content", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("lease_owner", sa.String(length=64), nullable=True),
        sa.Column("lease_token", sa.String(length=36), nullable=True),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("starts", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_operations_job_id_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operations")),
    )
    op.create_index(op.f("ix_operations_job_id"), "operations", ["job_id"])
    op.create_index("ix_operations_work", "operations", ["state", "lease_owner", "due_at"])


def _series() -> None:
    op.create_table(
        "metric_chunks",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("window", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rows", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("outline", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_metric_chunks_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "window", "attempt", name=op.f("pk_metric_chunks")),
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
        "log_chunks",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("first", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.Column("lines", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_log_chunks_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "first", name=op.f("pk_log_chunks")),
    )
    op.create_table(
        "rank_chunks",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("place", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("width_s", sa.BigInteger(), nullable=False),
        sa.Column("ranks", sa.BigInteger(), nullable=False),
        sa.Column("counts", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("steps", sa.LargeBinary(), nullable=False),
        sa.Column("compute", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_rank_chunks_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "place", name=op.f("pk_rank_chunks")),
    )
    op.create_table(
        "rank_states",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("seen", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_rank_states_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_rank_states")),
    )
