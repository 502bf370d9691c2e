"""The identity of an installation, which its first start fills in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "installation",
        sa.Column("one", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("key_fingerprint", sa.String(length=64), nullable=True),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_installation")),
    )
