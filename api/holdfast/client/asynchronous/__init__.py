"""The client for event loops, and the source of the client for threads.

`api/generate_client.py` writes each module here into `synchronous/` without `async` and `await`, so
names and docstrings must fit both. What the two do differently is in `async_waiting.py` and
`waiting.py`.
"""
