"""Since when a job is in the queue, and the nodes that it must not take when it starts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("queued_at", sa.Double(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("kept_off", sa.JSON(none_as_null=True), nullable=True))
    names = ("id", "state", "created_at", "queued_at")
    jobs = sa.table("jobs", *(sa.column(name) for name in names))
    events = sa.table(
        "events",
        sa.column("job_id"),
        sa.column("at"),
        sa.column("kind"),
        sa.column("data", sa.JSON()),
    )
    # A job that was paused or gave its nodes back came into the queue later than it was submitted.
    again = sa.select(sa.func.max(events.c.at)).where(
        events.c.job_id == jobs.c.id,
        events.c.kind == "job.state",
        events.c.data["to"].as_string() == "QUEUED",
    )
    since = sa.func.coalesce(again.scalar_subquery(), jobs.c.created_at)
    op.execute(jobs.update().where(jobs.c.state == "QUEUED").values(queued_at=since))
