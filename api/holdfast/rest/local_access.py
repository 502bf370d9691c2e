"""Who may use a server of one person: programs with its token, and browsers that it let in.

Commands send the token of `server.json` as a bearer token. A browser opens a link with a code, and
exchanges the code, which is then used up, for a session. A session has two secrets, because
browsers send a cookie to every port of a host, those of other users included: the cookie, which
scripts cannot read, and the page's key, which stays with the origin and comes in a header.

Codes and sessions end with the process: another program that gets the port of a stopped server
learns nothing that its successor accepts.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

CODE_VALID_S = 900.0
SESSION_VALID_S = 7 * 86400.0
MOST_KEPT = 1000
"""Most codes, and most sessions, at a time: the oldest ones end first."""


Value = TypeVar("Value")


@dataclass(frozen=True)
class Principal:
    """The person or program that a request comes from."""

    name: str


LOCAL_USER = Principal("local")
ANYBODY = Principal("anybody")
"""The principal of every request to a server without authentication."""


@dataclass(frozen=True)
class Session:
    """A browser's session, which it gets for its code."""

    cookie: str
    page_key: str


class LocalAccess:
    """The token, the codes and the sessions of one server process. `now` is a monotonic clock."""

    def __init__(self, token: str, now: Callable[[], float] = time.monotonic) -> None:
        self._token = _digest(token)
        self._now = now
        self._codes: dict[bytes, float] = {}
        self._sessions: dict[bytes, tuple[bytes, float]] = {}
        self.cookie_name = f"holdfast-{hashlib.sha256(b'cookie' + self._token).hexdigest()[:12]}"
        """Differs between servers: those of one host share its cookies."""

    def accepts_token(self, token: str) -> bool:
        return hmac.compare_digest(_digest(token), self._token)

    def issue_code(self) -> str:
        """A code that opens one session, within `CODE_VALID_S`."""
        code = secrets.token_urlsafe(32)
        _keep(self._codes, _digest(code), self._now() + CODE_VALID_S)
        return code

    def open_session(self, code: str) -> Session | None:
        """A session for the code, which is used up; None if it is unknown, used or too old."""
        valid_until = self._codes.pop(_digest(code), None)
        if valid_until is None or valid_until < self._now():
            return None
        session = Session(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        ends = self._now() + SESSION_VALID_S
        _keep(self._sessions, _digest(session.cookie), (_digest(session.page_key), ends))
        return session

    def accepts_session(self, cookie: str, page_key: str | None) -> bool:
        """Whether the session is open; without `page_key`, its cookie alone counts."""
        known, ends = self._sessions.get(_digest(cookie), (b"", 0.0))
        if not known or ends < self._now():
            return False
        return page_key is None or hmac.compare_digest(_digest(page_key), known)


def _digest(secret: str) -> bytes:
    """A digest of fixed length: a comparison of digests tells nothing of the secret, and takes any
    text."""
    return hashlib.sha256(secret.encode(errors="backslashreplace")).digest()


def _keep(kept: dict[bytes, Value], key: bytes, value: Value) -> None:
    kept[key] = value
    while len(kept) > MOST_KEPT:
        del kept[next(iter(kept))]
