"""The events of a job: one frozen dataclass per kind, and one codec to JSON and back.

The field names are the keys of the JSON that the journal, the database and the REST API show; they
never change. A reader ignores fields that it does not know and fills in defaults for fields that
an older writer did not have.
"""
