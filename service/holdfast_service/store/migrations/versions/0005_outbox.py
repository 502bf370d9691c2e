"""The outbox of webhook messages."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
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


def downgrade() -> None:
    op.drop_index(op.f("ix_outbox_due_at"), table_name="outbox")
    op.drop_table("outbox")
