"""Read-only queries behind the API: ranks, logs, metric series, timelines, fleet statistics.

Readers never change a row; each bounds the time and the memory that one request may take.
"""
