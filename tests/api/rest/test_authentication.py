"""A server of one person: who has the token gets in, and browsers that this person let in."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.service.live_server import SPEC, LiveServer, live_server
from tests.support.waiting import DEADLINE_S

from holdfast.rest import dashboard, openapi
from holdfast.rest.http.authentication import PAGE_KEY_HEADER, principal_of
from holdfast.rest.local_access import CODE_VALID_S, LOCAL_USER, SESSION_VALID_S, LocalAccess

TOKEN = "a-token-of-the-tests-" + "0" * 32
BEARER = {"Authorization": f"Bearer {TOKEN}"}
OPEN = {("get", "/healthz"), ("get", "/readyz"), ("post", "/api/v1/session")}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    access = LocalAccess(TOKEN)
    with live_server(tmp_path_factory.mktemp("locked"), access=access) as server:
        yield server


@pytest.fixture
def http(locked: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=locked.address, timeout=DEADLINE_S, trust_env=False) as client:
        yield client


def refused(answer: httpx.Response) -> bool:
    if answer.status_code != 401:
        return False
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.request.method == "HEAD" or "holdfast dashboard" in answer.json()["detail"]
    return True


def signed_in(http: httpx.Client) -> tuple[dict[str, str], str]:
    """The headers of a page with a session, and its cookie as the server sent it."""
    code = http.post("/api/v1/session/codes", headers=BEARER).json()["code"]
    answer = http.post("/api/v1/session", headers={"Holdfast-Code": code})
    assert answer.status_code == 200, answer.text
    http.cookies.clear()  # the tests send it themselves
    name, morsel = next(iter(SimpleCookie(answer.headers["set-cookie"]).items()))
    page = {"Cookie": f"{name}={morsel.value}", PAGE_KEY_HEADER: answer.json()["page_key"]}
    return page, answer.headers["set-cookie"]


def test_no_route_answers_without_the_token(http: httpx.Client) -> None:
    for path, methods in openapi.document()["paths"].items():
        for method in methods:
            url = path.replace("{", "").replace("}", "")
            answer = http.request(method, url)
            assert refused(answer) is ((method, path) not in OPEN), (method, path)
    for url in ("/metrics", "/version", "/api/v1/openapi.json", "/api", "/api/v1/none"):
        assert refused(http.get(url)), url
    assert http.get("/healthz").status_code == 200
    assert not refused(http.get("/jobs")), "the page itself holds no data"


def test_no_other_spelling_of_a_path_passes_the_door(http: httpx.Client) -> None:
    """`$` in the pattern of a route matches before a line break too."""
    for path, methods in openapi.document()["paths"].items():
        for method in methods:
            for tail in ("%0A", "%0a%0a", "%0d", "/", "/%0A", "%00", "%E2%80%A8", ";x", "."):
                url = path.replace("{", "").replace("}", "") + tail
                assert refused(http.request(method, url)), (method, url)
    for url in ("/metrics", "/version", "/api/v1/openapi.json", "//api/v1/jobs", "/API/v1/jobs"):
        for tail in ("%0A", "/", "/%0A"):
            assert refused(http.get(url + tail)), url + tail
    for url in (*dashboard.VIEWS, "/assets/none", "/boot.js", "/mark.svg"):
        assert not refused(http.get(url.replace("{rest:path}", "x"))), url


def test_nobody_sends_a_body(locked: LiveServer, http: httpx.Client) -> None:
    """It would take one of the few places of large bodies, or a file."""
    for method, path in (
        ("POST", "/api/v1/session"),
        ("POST", "/healthz"),
        ("GET", "/"),
        ("POST", "/jobs"),
    ):
        for body in (b"x", iter([b"x"])):
            headers = {"Holdfast-Code": "guess"}
            answer = http.request(method, path, content=body, headers=headers)
            assert refused(answer) and answer.json()["code"] == "unauthorized", (method, path)


def test_nobody_learns_why_the_server_is_not_ready(tmp_path: Path) -> None:
    async def database() -> str | None:
        raise OSError("password of user 'holdfast' refused by db.internal")

    probes = {"database": database}
    with live_server(tmp_path, access=LocalAccess(TOKEN), probes=probes) as server:
        for headers in ({}, BEARER):
            answer = httpx.get(f"{server.address}/readyz", headers=headers, trust_env=False)
            assert answer.status_code == 503 and answer.json()["checks"].keys() == {"database"}
            assert ("db.internal" in answer.text) is bool(headers)


def test_the_token_opens_everything_and_another_one_nothing(http: httpx.Client) -> None:
    assert http.post("/api/v1/jobs/validate", json=SPEC, headers=BEARER).status_code == 200
    assert (
        http.get("/api/v1/jobs", headers={"Authorization": f"bearer  {TOKEN}"}).status_code == 200
    )
    for wrong in (f"Bearer {TOKEN}0", f"Basic {TOKEN}", TOKEN, "Bearer", "Bearer \xff", ""):
        value = wrong.encode("latin-1")
        answer = http.get("/api/v1/jobs", headers=[(b"Authorization", value)])
        assert refused(answer), wrong
        assert TOKEN not in answer.text
    twice = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer other")]
    assert refused(http.get("/api/v1/jobs", headers=twice))


def test_the_refusal_comes_before_any_byte_of_the_body(locked: LiveServer) -> None:
    port = int(locked.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        head = (
            f"POST /api/v1/code HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 9999\r\n\r\n"
        )
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


def test_a_code_opens_one_session_and_its_cookie_is_for_the_api_alone(http: httpx.Client) -> None:
    code = http.post("/api/v1/session/codes", headers=BEARER).json()["code"]
    exchange = {"Holdfast-Code": code}
    first = http.post("/api/v1/session", headers=exchange)
    attributes = {part.strip().lower() for part in first.headers["set-cookie"].split(";")[1:]}
    wanted = {"httponly", "samesite=lax", "path=/api/", f"max-age={SESSION_VALID_S:.0f}"}
    assert attributes == wanted
    again = http.post("/api/v1/session", headers=exchange)
    assert refused(again) and again.json()["code"] == "code_refused"
    assert refused(http.post("/api/v1/session", headers={"Holdfast-Code": "guess"}))
    assert http.post("/api/v1/session").status_code == 422


def test_a_page_needs_cookie_key_and_for_a_change_its_origin(
    http: httpx.Client, locked: LiveServer
) -> None:
    page, _ = signed_in(http)
    own = {"Origin": locked.address}
    cookie = {"Cookie": page["Cookie"]}
    key = {PAGE_KEY_HEADER: page[PAGE_KEY_HEADER]}
    change = ("POST", "/api/v1/jobs/validate")
    assert http.get("/api/v1/jobs", headers=page).status_code == 200
    assert http.request(*change, json=SPEC, headers=page | own).status_code == 200
    for lacking in (cookie, key, cookie | {PAGE_KEY_HEADER: "other"}, {"Cookie": "holdfast-0=1"}):
        assert refused(http.get("/api/v1/jobs", headers=lacking)), lacking
        assert refused(http.request(*change, json=SPEC, headers=lacking | own)), lacking
    assert refused(http.request(*change, json=SPEC, headers=page)), "without Origin"
    foreign = http.request(*change, json=SPEC, headers=page | {"Origin": "http://127.0.0.1:1"})
    assert foreign.status_code == 403
    assert refused(http.get("/api/v1/jobs", headers=page | {"Authorization": "Bearer other"}))


def test_links_to_files_need_the_cookie_only(http: httpx.Client) -> None:
    page, _ = signed_in(http)
    cookie = {"Cookie": page["Cookie"]}
    for path in ("/api/v1/jobs/none/logs/download", "/api/v1/operations/none/content"):
        assert not refused(http.get(path, headers=cookie)), path
        assert refused(http.get(path)), path
    assert refused(http.post("/api/v1/jobs/none/logs/download", headers=cookie))


def scope(**headers: str) -> dict[str, Any]:
    names = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "GET", "path": "/api/v1/jobs", "headers": names}


def test_codes_and_sessions_end_with_their_time_and_with_their_server() -> None:
    now = 0.0
    access = LocalAccess(TOKEN, lambda: now)
    late, early = access.issue_code(), access.issue_code()
    session = access.open_session(early)
    assert session is not None
    now = CODE_VALID_S + 1
    assert access.open_session(late) is None

    def principal(of: LocalAccess) -> object:
        cookie, key = f"{of.cookie_name}={session.cookie}", session.page_key
        return principal_of(of, scope(cookie=cookie, **{PAGE_KEY_HEADER: key}))

    assert principal(access) == LOCAL_USER
    assert principal(LocalAccess(TOKEN, lambda: now)) is None, "of the next process"
    now = SESSION_VALID_S + 1
    assert principal(access) is None


def test_unused_codes_do_not_pile_up() -> None:
    access = LocalAccess(TOKEN)
    codes = [access.issue_code() for _ in range(1001)]
    assert access.open_session(codes[0]) is None
    assert access.open_session(codes[1]) is not None


def test_servers_of_one_host_have_cookies_of_their_own() -> None:
    assert LocalAccess(TOKEN).cookie_name == LocalAccess(TOKEN).cookie_name
    assert LocalAccess(TOKEN).cookie_name != LocalAccess("other").cookie_name


def test_a_server_without_authentication_needs_no_code(tmp_path: Path) -> None:
    with live_server(tmp_path) as server, httpx.Client(base_url=server.address) as http:
        assert http.post("/api/v1/session/codes").json() == {"code": None}
        answer = http.post("/api/v1/session", headers={"Holdfast-Code": "any"})
        assert answer.json() == {"page_key": ""}
        assert http.get("/api/v1/jobs").status_code == 200
