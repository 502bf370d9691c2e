"""The Python client of the REST API. Loads neither Ray nor torch nor the server's framework."""
