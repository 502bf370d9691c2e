"""Hosts and origins are read strictly."""

from __future__ import annotations

import string
from urllib.parse import urlsplit

from hypothesis import given
from hypothesis import strategies as st

from holdfast.rest.origins import host_port, origin_of

_TEXTS = st.text(string.ascii_letters + string.digits + "@:/[].-_#?\\%,; \t\né", max_size=12)


@given(_TEXTS)
def test_what_is_read_as_a_host_has_no_other_reading(text: str) -> None:
    found = host_port(text)
    if found is None:
        return
    name, port = found
    parts = urlsplit(f"//{text}")
    assert (parts.hostname, parts.port) == (name, port)
    assert (parts.username, parts.path, parts.query, parts.fragment) == (None, "", "", "")


@given(
    st.sampled_from(["a", "a.b-c", "LocalHost", "10.0.0.1", "[::1]", "[fd00::5]", "a_b"]),
    st.one_of(st.none(), st.integers(1, 65535)),
)
def test_hosts_are_read_with_and_without_a_port(name: str, port: int | None) -> None:
    text = name if port is None else f"{name}:{port}"
    host = name.lower().strip("[]")
    assert host_port(text) == (host, port)
    assert origin_of(f"http://{text}") == ("http", host, port or 80)
    for more in ("/", "/x", "?", "#", " ", "\n", "@a"):
        assert origin_of(f"https://{text}{more}") is None
        assert origin_of(f"https://x{more}@{text}") is None
