"""A reconciler renews one expiry time for all its jobs. Ends the leases of older servers: their
later writes are rejected, because their tokens are deleted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "lease_owners",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lease_owners")),
    )
    op.execute("UPDATE jobs SET lease_owner = NULL, lease_token = NULL")
    op.drop_index("ix_jobs_work", table_name="jobs")
    op.drop_column("jobs", "lease_until")
    op.create_index("ix_jobs_work", "jobs", ["cleaned", "lease_owner", "due_at"])


def downgrade() -> None:
    op.drop_index("ix_jobs_work", table_name="jobs")
    op.add_column("jobs", sa.Column("lease_until", sa.Double(), nullable=False, server_default="0"))
    op.create_index("ix_jobs_work", "jobs", ["cleaned", "lease_until", "due_at"])
    op.execute("UPDATE jobs SET lease_owner = NULL, lease_token = NULL")
    op.drop_table("lease_owners")
