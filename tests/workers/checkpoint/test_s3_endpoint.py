"""Endpoints of S3 services: which are the same, and which are local."""

from __future__ import annotations

import pytest

from holdfast_workers.checkpoint.s3_endpoint import is_same_endpoint, local_address


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, None),
        ("https://storage.example.com", "https://STORAGE.example.com:443/"),
        ("http://10.0.0.1:9000", "http://10.0.0.1:9000"),
    ],
)
def test_two_ways_to_write_one_endpoint(one: str | None, other: str | None) -> None:
    assert is_same_endpoint(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, "https://s3.amazonaws.com"),
        ("https://storage.example.com", "http://storage.example.com"),
        ("https://storage.example.com", "https://storage.example.com:8443"),
        ("https://storage.example.com", "https://storage.example.com.thief.example"),
        ("https://storage.example.com", "https://storage.example.com/thief"),
        ("https://storage.example.com", "https://storage.example.com?thief"),
        ("https://[::1", "https://[::1"),
        ("http://host:99999", "http://host:99999"),
    ],
)
def test_endpoints_that_differ_or_cannot_be_read(one: str | None, other: str | None) -> None:
    assert not is_same_endpoint(one, other)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "2130706433", "0x7f.1", "[::]", "[fe80::1]", "[fd00:ec2::254]"]
)
def test_addresses_of_this_machine_and_its_link_are_local(host: str) -> None:
    assert local_address(f"http://{host}:9000") is not None


@pytest.mark.parametrize(
    "endpoint", ["http://10.0.0.1", "http://[2001:db8::1]:9000", "http://[::1"]
)
def test_other_addresses_are_not(endpoint: str) -> None:
    assert local_address(endpoint) is None
