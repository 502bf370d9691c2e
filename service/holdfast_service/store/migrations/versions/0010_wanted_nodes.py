"""The number of nodes that the user of an elastic job ordered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("wanted_nodes", sa.BigInteger(), nullable=True))
