"""The search for claimable jobs skips leased jobs in its index."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_jobs_work", table_name="jobs")
    op.create_index("ix_jobs_work", "jobs", ["cleaned", "lease_until", "due_at"])


def downgrade() -> None:
    op.drop_index("ix_jobs_work", table_name="jobs")
    op.create_index("ix_jobs_work", "jobs", ["cleaned", "due_at", "lease_until"])
