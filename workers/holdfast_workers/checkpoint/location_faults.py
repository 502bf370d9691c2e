"""What is wrong with the location of a storage in a spec, by its form. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Protocol
from urllib.parse import urlsplit

from holdfast_workers.checkpoint.storage import uri_fault
from holdfast_workers.spec import DataSpec, RemoteTierSpec, SpecFault

# What the S3 client accepts; it raises ValueError for any other.
_REGION = re.compile(r"(?![0-9]+$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
_HOST = re.compile(r"((?!-)[A-Za-z0-9-]{1,63}(?<!-)\.)*(?!-)[A-Za-z0-9-]{1,63}(?<!-)\.?")


class BucketAccess(Protocol):
    """How a section of a spec reaches a bucket."""

    @property
    def endpoint(self) -> str | None: ...

    @property
    def region(self) -> str | None: ...

    @property
    def secret(self) -> str | None: ...


def remote_tier_faults(remote: RemoteTierSpec) -> list[SpecFault]:
    """The faults of the location of a remote tier."""
    found: list[SpecFault] = []
    problem = uri_fault(remote.uri) if remote.uri is not None else None
    if problem is not None:
        message = f"{remote.uri!r} cannot be used as storage: {problem}"
        found.append(SpecFault(path="checkpoint.remote.uri", message=message))
    return [*found, *_access_faults("checkpoint.remote", "uri", remote.uri, remote)]


def data_location_faults(data: DataSpec) -> Iterator[SpecFault]:
    """The faults of the locations of a job's sources and token sets. That the path of a source is
    absolute, or in a bucket, is in `spec/data_faults.py`."""
    for section, source in data.read_sources.items():
        if source.bucket is not None and (problem := uri_fault(source.bucket)):
            message = f"{source.path!r} cannot be read: {problem}"
            yield SpecFault(path=f"{section}.path", message=message)
        yield from _access_faults(section, "path", source.path, source)
    for place, prepared in data.token_sets.items():
        if problem := uri_fault(prepared.uri):
            message = f"{prepared.uri!r} cannot be read: {problem}"
            yield SpecFault(path=f"{place}.uri", message=message)


def _access_faults(
    section: str, of_uri: str, uri: str | None, access: BucketAccess
) -> Iterator[SpecFault]:
    """The faults of endpoint, region and secret; `of_uri`: the field whose value is `uri`."""
    in_bucket = (uri or "").startswith("s3://")
    if not in_bucket:
        for name in ("endpoint", "region", "secret"):
            if getattr(access, name) is not None:
                message = (
                    f"{name} needs a bucket: set {of_uri} to s3://bucket/prefix, or remove {name}"
                )
                path, beside = f"{section}.{name}", (f"{section}.{of_uri}",)
                yield SpecFault(path=path, message=message, beside=beside)
    elif access.region is not None and not _REGION.fullmatch(access.region):
        message = f"{access.region!r} is not a region: write its name, such as us-east-1"
        yield SpecFault(path=f"{section}.region", message=message)
    if access.endpoint is None:
        return
    if problem := _endpoint_fault(access.endpoint):
        yield SpecFault(path=f"{section}.endpoint", message=problem)
    if access.secret is None and in_bucket:
        message = "an endpoint needs a secret: the server's own credentials are for AWS only"
        beside = (f"{section}.endpoint",)
        yield SpecFault(path=f"{section}.secret", message=message, beside=beside)


def _endpoint_fault(endpoint: str) -> str | None:
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and parts.port != 0 and _is_host(parts.hostname)
    except ValueError:  # half an address in brackets, a port that is not a number
        usable = False
    if not usable or not endpoint.isprintable() or " " in endpoint:
        return f"{endpoint!r} is not a URL: write https://host or http://host:port"
    if parts.username is not None:
        return "an endpoint must not contain credentials: set secret instead"
    if parts.query or parts.fragment:
        return f"{endpoint!r} has a query or fragment: write https://host or http://host:port"
    return None


def _is_host(host: str | None) -> bool:
    if host is None or len(host) > 255:
        return False
    with contextlib.suppress(ValueError):
        return bool(ip_address(host))
    return _HOST.fullmatch(host) is not None
