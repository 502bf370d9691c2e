"""The REST API. Routers only translate between HTTP and the service: they hold no state, make no
decisions and touch no table. Every error leaves as `application/problem+json` with a stable code.
"""
