"""The truth about jobs: tables, transactions, leases and queries. Knows nothing of Ray or HTTP."""
