"""The exact versions of the packages that jobs add to their nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("packages", sa.JSON(none_as_null=True), nullable=True))
