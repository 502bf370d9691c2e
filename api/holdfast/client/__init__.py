"""The Python client of the REST API. Loads neither Ray nor torch nor the server's framework."""

from holdfast.client.async_client import AsyncClient
from holdfast.client.async_jobs import AsyncJob
from holdfast.client.calls import LogFilter
from holdfast.client.client import Client
from holdfast.client.jobs import Job

__all__ = ["AsyncClient", "AsyncJob", "Client", "Job", "LogFilter"]
