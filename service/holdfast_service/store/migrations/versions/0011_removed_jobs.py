"""What stays of a removed job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "removed_jobs",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("removed_at", sa.Double(), nullable=False),
        sa.Column("answer", sa.JSON(), nullable=False),
        sa.Column("productive_s", sa.Double(), nullable=False),
        sa.Column("held_s", sa.Double(), nullable=False),
        sa.Column("changed", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_removed_jobs")),
    )
    op.create_index(op.f("ix_removed_jobs_changed"), "removed_jobs", ["changed"])
