"""The client for threads. `api/generate_client.py` writes its modules from `asynchronous/`."""
