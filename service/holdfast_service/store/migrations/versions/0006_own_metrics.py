"""Names of the metrics reported by users' functions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "jobs",
        sa.Column("own_metrics", sa.JSON(none_as_null=True), nullable=False, server_default="[]"),
    )


def downgrade() -> None:
    op.drop_column("jobs", "own_metrics")
