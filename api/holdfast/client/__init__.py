"""The Python client of the REST API. Loads neither Ray nor torch nor the server's framework."""

from holdfast.client.client import Client

__all__ = ["Client"]
