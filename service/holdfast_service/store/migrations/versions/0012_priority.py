"""Priorities of jobs, a count of the changes by users, and the build that their ranks run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name, value in (("priority", "0"), ("generation", "1")):
        op.add_column(
            "jobs", sa.Column(name, sa.BigInteger(), nullable=False, server_default=value)
        )
    op.add_column("jobs", sa.Column("build", sa.String(length=64), nullable=True))
