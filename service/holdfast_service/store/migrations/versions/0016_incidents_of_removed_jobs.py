"""What the totals over all jobs need of the incidents of a removed job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("incidents", sa.JSON(none_as_null=True), nullable=True)
    op.add_column("removed_jobs", column)
