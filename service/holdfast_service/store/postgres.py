"""Opens PostgreSQL databases by the URLs that libpq understands, also behind a pooler.

The driver parses the URL itself, so that `sslmode` and the like mean what they mean for psql. With
`?pgbouncer=true` no statement is prepared beyond its transaction: a pooler gives each transaction
another connection to the server.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from holdfast_service.store.json_safe import to_json

_PREPARED_STATEMENTS = 500
"""Size of each connection's cache of prepared statements; fewer statements exist."""
_POOLER = "pgbouncer"
_UNKNOWN_TO_DRIVER = frozenset(
    {
        *("channel_binding", "connect_timeout", "gssencmode", "sslcompression", "sslsni"),
        *("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count"),
    }
)
"""Options of libpq that the driver would send to the server, which refuses them."""


def engine_for(url: URL, pool: int) -> AsyncEngine:
    """The engine for the database at `url`."""
    import asyncpg  # late: a server on SQLite does not need it

    pooler = str(url.query.get(_POOLER, "")).lower() in ("true", "1", "yes", "on")
    options: dict[str, Any] = {"prepared_statement_cache_size": _PREPARED_STATEMENTS}
    limits: dict[str, int] = {}
    if pooler:
        options = {"prepared_statement_cache_size": 0, "prepared_statement_name_func": lambda: ""}
        limits = {"statement_cache_size": 0}
    dsn = url.set(drivername="postgresql").difference_update_query({_POOLER, *_UNKNOWN_TO_DRIVER})
    shown = dsn.render_as_string(hide_password=False)

    async def connect(*_address: Any, **_options: Any) -> Any:
        return await asyncpg.connect(shown, **limits)

    engine = create_async_engine(
        "postgresql+asyncpg://",
        pool_size=pool,
        max_overflow=0,
        pool_use_lifo=True,  # the last used connection has most statements prepared
        connect_args={**options, "async_creator_fn": connect},
        json_serializer=to_json,
    )
    event.listen(engine.sync_engine, "checkout", _reject_closed_connection)
    return engine


def _reject_closed_connection(connection: Any, _record: Any, _proxy: Any) -> None:
    """Makes the pool replace a connection that the server has closed. The pool's own check queries
    the server each time, which costs three times as much as a statement."""
    if connection.driver_connection.is_closed():
        raise DisconnectionError("the server closed the connection")
