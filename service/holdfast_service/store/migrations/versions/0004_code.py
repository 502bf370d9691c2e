"""Users' code packages, and the package of each job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "code_packages",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_code_packages")),
    )
    op.add_column("jobs", sa.Column("code", sa.String(length=80), nullable=True))
    op.create_index(op.f("ix_jobs_code"), "jobs", ["code"])


def downgrade() -> None:
    op.drop_index(op.f("ix_jobs_code"), table_name="jobs")
    op.drop_column("jobs", "code")
    op.drop_table("code_packages")
