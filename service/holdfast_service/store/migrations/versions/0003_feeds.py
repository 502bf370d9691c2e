"""Data for lists and live pages: job statistics, outlines of series, rank times and states."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_OF_JOBS = ("goodput", "productive_s", "held_since", "step_s", "told_at")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("owner", sa.String(length=64), nullable=True))
    for name in _OF_JOBS:
        op.add_column("jobs", sa.Column(name, sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("held_s", sa.Double(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("changed", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index("ix_jobs_changed", "jobs", ["changed"])
    op.create_index("ix_jobs_goodput", "jobs", ["goodput", "id"])
    op.create_index("ix_jobs_search", "jobs", ["state", "name", "owner", "id"])
    op.create_index("ix_events_kind", "events", ["job_id", "kind", "seq"])
    op.add_column("metric_chunks", sa.Column("outline", sa.JSON(none_as_null=True), nullable=True))
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


def downgrade() -> None:
    op.drop_table("rank_states")
    op.drop_table("rank_chunks")
    op.drop_column("metric_chunks", "outline")
    op.drop_index("ix_events_kind", table_name="events")
    for index in ("ix_jobs_search", "ix_jobs_goodput", "ix_jobs_changed"):
        op.drop_index(index, table_name="jobs")
    for name in ("changed", "held_s", "owner", *_OF_JOBS):
        op.drop_column("jobs", name)
