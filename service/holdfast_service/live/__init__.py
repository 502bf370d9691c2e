"""Live updates: one reader of the store feeds all streams of a server.

Modules: `hub` polls and wakes, `changed_jobs` is the reader, `rows` feeds the rows of all jobs,
`job_channel` feeds one job in full, `stream_cursor` holds positions and messages, `followers` waits
for events or log lines. Nobody queries the store while they are up to date.
"""
