"""Live updates: one reader of the store feeds all live streams of a server.

Modules: `hub` polls and wakes listeners, `rows` feeds the rows of all jobs, `job_channel` feeds one
job in full, `stream_cursor` holds positions and messages. Listeners never query the store while
they are up to date.
"""
