"""Requests from web pages: only those of this server's own pages, and of its named proxies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.support.service.live_server import SPEC, LiveServer, live_server
from tests.support.waiting import DEADLINE_S

from holdfast.rest.serve import LOOPBACK_NAMES, trusted_addresses
from holdfast_service.settings import Settings

PROXIES = ("lab.example", "http://intern.example:8080")


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    settings = Settings(allowed_host=PROXIES)
    names, origins = trusted_addresses(settings, exposed=False)
    folder = tmp_path_factory.mktemp("guard")
    with live_server(folder, allowed_hosts=names, allowed_origins=origins) as server:
        yield server


def post(server: LiveServer, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"{server.address}/api/v1/jobs/validate"
    return httpx.post(url, json=SPEC, headers=named, timeout=DEADLINE_S, trust_env=False)


def is_foreign(answer: httpx.Response) -> bool:
    if answer.status_code == 200:
        return False
    problem: dict[str, Any] = answer.json()
    assert (answer.status_code, problem["code"]) == (403, "foreign_origin"), problem
    assert "--allowed-host" in problem["detail"]
    return True


def test_a_page_of_another_port_scheme_or_name_is_refused(proxied: LiveServer) -> None:
    port = int(proxied.address.rpartition(":")[2])
    own = post(proxied, Origin=proxied.address)
    assert not is_foreign(own) and "access-control-allow-origin" not in own.headers
    for origin in (
        f"http://127.0.0.1:{port - 1}",
        "http://127.0.0.1",
        f"https://127.0.0.1:{port}",
        f"http://localhost:{port}",
        f"http://127.0.0.2:{port}",
        "http://[::1",
        "http://127.0.0.1:port",
        "file://",
        "null",
        "",
    ):
        assert is_foreign(post(proxied, Origin=origin)), origin


def test_a_forwarded_port_is_an_own_origin(proxied: LiveServer) -> None:
    assert not is_foreign(post(proxied, Host="localhost:9000", Origin="http://localhost:9000"))
    assert is_foreign(post(proxied, Host="localhost:9000", Origin="http://localhost:9001"))


@pytest.mark.parametrize("host", [None, "lab.example", "lab.example:443"])
def test_pages_of_a_named_proxy_are_accepted(proxied: LiveServer, host: str | None) -> None:
    own = {} if host is None else {"Host": host}  # a proxy may keep the name, or replace it
    assert not is_foreign(post(proxied, Origin="https://lab.example", **own))
    assert not is_foreign(post(proxied, Origin="https://LAB.example:443", **own))
    assert not is_foreign(post(proxied, Origin="http://intern.example:8080", **own))
    assert is_foreign(post(proxied, Origin="https://lab.example:8443", **own))
    assert is_foreign(post(proxied, Origin="https://intern.example:8080", **own))
    assert is_foreign(post(proxied, Origin="https://evil.lab.example", **own))


def test_the_browser_s_word_on_the_site_is_heeded(proxied: LiveServer) -> None:
    for site in ("same-origin", "none"):
        assert not is_foreign(post(proxied, Sec_Fetch_Site=site))
    for site in ("same-site", "cross-site", "anything"):
        assert is_foreign(post(proxied, Sec_Fetch_Site=site)), site
    url = f"{proxied.address}/api/v1/jobs"
    image = {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    assert is_foreign(httpx.get(url, headers=image, trust_env=False, timeout=DEADLINE_S))
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    for place, refused in (("document", False), ("iframe", True)):
        answer = httpx.get(
            url, headers={**link, "Sec-Fetch-Dest": place}, trust_env=False, timeout=DEADLINE_S
        )
        assert is_foreign(answer) is refused
    form = {"Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert is_foreign(post(proxied, Sec_Fetch_Site="cross-site", **form))


def test_an_exposed_server_checks_the_names_that_it_was_given() -> None:
    assert trusted_addresses(Settings(), exposed=True) == (None, frozenset())
    names, origins = trusted_addresses(Settings(allowed_host=PROXIES), exposed=True)
    assert names == LOOPBACK_NAMES | {"lab.example", "intern.example"}
    assert origins == {("https", "lab.example", 443), ("http", "intern.example", 8080)}


@pytest.mark.parametrize(
    ("named", "host"), [("[fd00::5]", "fd00::5"), ("[10.0.0.5]", "10.0.0.5"), ("pod", "pod")]
)
def test_a_name_may_be_an_address_of_either_kind_in_brackets(named: str, host: str) -> None:
    names, origins = trusted_addresses(
        Settings(allowed_host=(f"http://{named}:8642",)), exposed=True
    )
    assert names == LOOPBACK_NAMES | {host}
    assert origins == {("http", host, 8642)}


def test_proxies_are_named_in_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_ALLOWED_HOST", "lab.example, http://intern.example:8080")
    assert Settings().allowed_host == PROXIES
