"""The REST API: routers that only translate between HTTP and the service."""
