"""Endpoints of S3 services: which are the same, and which are local."""

from __future__ import annotations

import pytest

from holdfast_workers.checkpoint.s3_endpoint import is_same_endpoint, local_address


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (None, None, True),
        ("https://storage.example.com", "https://STORAGE.example.com:443/", True),
        ("http://10.0.0.1:9000", "http://10.0.0.1:9000", True),
        (None, "https://s3.amazonaws.com", False),
        ("https://storage.example.com", "http://storage.example.com", False),
        ("https://storage.example.com", "https://storage.example.com:8443", False),
        ("https://storage.example.com", "https://storage.example.com.thief.example", False),
        ("https://storage.example.com", "https://storage.example.com/thief", False),
        ("https://storage.example.com", "https://storage.example.com?thief", False),
        ("https://[::1", "https://[::1", False),
        ("http://host:99999", "http://host:99999", False),
    ],
)
def test_endpoints_are_the_same_only_if_both_can_be_read(
    one: str | None, other: str | None, same: bool
) -> None:
    assert is_same_endpoint(one, other) is same


LOCAL = ("127.0.0.1", "2130706433", "0x7f.1", "[::]", "[fe80::1]", "[fd00:ec2::254]")


@pytest.mark.parametrize("host", [*LOCAL, "10.0.0.1", "[2001:db8::1]", "[::1"])
def test_addresses_of_this_machine_and_its_link_are_local(host: str) -> None:
    assert (local_address(f"http://{host}:9000") is not None) is (host in LOCAL)
