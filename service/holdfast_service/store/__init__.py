"""The database: SQLite or PostgreSQL, behind one set of statements and transactions.

The database is the truth of the control plane. A transition, its event and its outbox rows are one
transaction.
"""
