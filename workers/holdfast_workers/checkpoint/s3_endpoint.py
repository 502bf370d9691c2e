"""Endpoints of S3 services: whether two are the same, and addresses that none may have.

An endpoint comes from a job's spec. Without these checks, a spec could make the server send
requests to services of its own machine, or to the metadata service of its cloud.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}
_METADATA = (ipaddress.ip_address("fd00:ec2::254"),)
"""Metadata services of clouds at addresses that are not link-local."""


def is_same_endpoint(one: str | None, other: str | None) -> bool:
    """Whether both are the same service; None is AWS. False if one of them cannot be read."""
    if one is None or other is None:
        return one is other
    try:
        return _parts(one) == _parts(other)
    except ValueError:
        return False


def local_address(endpoint: str) -> str | None:
    """The endpoint's loopback, link-local or metadata address, if its host has one now.

    None for a host that does not resolve: a request to it fails by itself, or goes to a proxy.
    Resolves the host's name, which may take seconds.
    """
    try:
        _, host, port, _ = _parts(endpoint)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return None
    addresses = [str(sockaddr[0]) for *_, sockaddr in found]
    return next((address for address in addresses if _is_local(address)), None)


def _is_local(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip in _METADATA


def _parts(endpoint: str) -> tuple[str, str, int | None, str]:
    """Scheme, host, port, and path with query. Raises ValueError."""
    parts = urlsplit(endpoint)
    port = parts.port or _PORTS.get(parts.scheme)
    return parts.scheme, parts.hostname or "", port, parts.path.rstrip("/") + parts.query
