"""The database: SQLite or PostgreSQL, behind one set of statements and transactions.

The database is the source of truth of the control plane. A state transition, its event and its
outbox rows are written in one transaction.
"""
