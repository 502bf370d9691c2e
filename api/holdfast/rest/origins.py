"""The origin of a web page, as browsers compare it: scheme, host and port."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

Origin = tuple[str, str, int]

DEFAULT_PORTS = {"http": 80, "https": 443}
_IPV4_IN_BRACKETS = re.compile(r"\[(\d+\.\d+\.\d+\.\d+)\]")
_HOST = re.compile(r"[a-z0-9._:-]+")


def origin_of(url: str) -> Origin | None:
    """The origin of a URL, whose port may be omitted; None if it has none (`null`, a file)."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in DEFAULT_PORTS or not _HOST.fullmatch(parts.hostname or ""):
        return None
    return parts.scheme, str(parts.hostname), port or DEFAULT_PORTS[parts.scheme]


def proxy_origin(text: str) -> Origin | None:
    """The origin of a proxy, given as a URL, or as HOST or HOST:PORT behind https; None if `text`
    is none of them. IPv6 addresses are in brackets, and IPv4 addresses may be: one text with a
    variable for the address then serves both."""
    url = text if "://" in text else f"https://{text}"
    url = _IPV4_IN_BRACKETS.sub(r"\1", url)
    return origin_of(url) if url.count("/") == 2 else None
