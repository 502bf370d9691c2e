"""How a user's program works with Holdfast: its level and its plug-in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("program", sa.JSON(none_as_null=True), nullable=True))
