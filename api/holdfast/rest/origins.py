"""The origin of a web page, as browsers compare it: scheme, host and port.

Both are read strictly by the grammar (RFC 9110, `uri-host [":" port]`; RFC 6454). A text with a
user, a path or a space is neither a host nor an origin: two lenient readers could find two hosts.
"""

from __future__ import annotations

import ipaddress
import re

Origin = tuple[str, str, int]

DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_PORT = 65535
_IPV4_IN_BRACKETS = re.compile(r"\[(\d+\.\d+\.\d+\.\d+)\]")
_NAME = r"[a-z0-9_](?:[a-z0-9._-]*[a-z0-9_.])?"
_HOST_PORT = re.compile(rf"(?:\[([0-9a-f:.]+)\]|({_NAME}))(?::([0-9]{{1,5}}))?", re.ASCII)


def host_port(text: str) -> tuple[str, int | None] | None:
    """The host of `HOST` or `HOST:PORT` in lower case, IPv6 without its brackets, and the port;
    None if `text` is neither."""
    found = _HOST_PORT.fullmatch(text.lower()) if text.isascii() else None
    if found is None:
        return None
    address, name, digits = found.groups()
    port = None if digits is None else int(digits)
    if port is not None and not 0 < port <= MAX_PORT:
        return None
    if address is not None:
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            return None
    return address or name, port


def origin_of(url: str) -> Origin | None:
    """The origin of `SCHEME://HOST[:PORT]`; None if `url` is anything else (`null`, a file)."""
    scheme, _, rest = url.lower().partition("://")
    found = host_port(rest)
    if scheme not in DEFAULT_PORTS or found is None:
        return None
    host, port = found
    return scheme, host, port or DEFAULT_PORTS[scheme]


def proxy_origin(text: str) -> Origin | None:
    """The origin of a proxy, given as a URL, or as HOST or HOST:PORT behind https; None if `text`
    is none of them. IPv6 addresses are in brackets, and IPv4 addresses may be: one text with a
    variable for the address then serves both."""
    url = text if "://" in text else f"https://{text}"
    return origin_of(_IPV4_IN_BRACKETS.sub(r"\1", url))
