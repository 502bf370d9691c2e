"""The alembic environment: runs migrations on the caller's connection, in its transaction."""

from __future__ import annotations

from alembic import context

from holdfast_service.store.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # The caller's transaction holds the lock that keeps other processes out.
    transaction_per_migration=False,
)
context.run_migrations()
