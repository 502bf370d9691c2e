"""Hostile requests get a clear 4xx, quickly, and the server keeps working."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.support.service.live_server import SPEC, LiveServer, live_server
from tests.support.waiting import DEADLINE_S

UNKNOWN_JOB = "01a1ff35-51af-7c6c-a7b5-9d5a4e2a3b1c"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("hostile")
    with live_server(folder, max_body_bytes=2**18) as server:
        yield server


def refused(answer: httpx.Response, *statuses: int) -> dict[str, Any]:
    """Check that the answer is a problem; return it."""
    assert answer.status_code in statuses, (answer.status_code, answer.text[:300])
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["code"] and problem["detail"]
    assert "Traceback" not in answer.text
    return problem


def ask(server: LiveServer, method: str, path: str, **request: Any) -> httpx.Response:
    url = f"{server.address}{path}"
    return httpx.request(method, url, timeout=DEADLINE_S, trust_env=False, **request)


def post(server: LiveServer, body: bytes, kind: str, path: str = "/api/v1/jobs") -> httpx.Response:
    return ask(server, "POST", path, content=body, headers={"content-type": kind})


BOMBS = {
    "deep flow lists": b"name: " + b"[" * 100_000,
    "deep flow maps": b"{a: " * 50_000,
    "deep block maps": b"\n".join(b" " * n + b"a:" for n in range(400)),
    "deep JSON": b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
    "aliases": b"a: &a [x,x,x]\nb: &b [*a,*a,*a]\nc: [*b,*b,*b]",
    "a tag": b"!!python/object/apply:os.system ['true']",
    "many keys": b"\n".join(b"k%d: 1" % n for n in range(5_000)),
    "a huge number": b"train: {steps: " + b"9" * 5_000 + b"}",
    "a huge exponent": b"train: {steps: 1e999999999}",
    "an endless number of devices": b"{name: x, resources: {gpus_per_worker: .inf}}",
    "half a device": b"{name: x, resources: {gpus_per_worker: 0.5}}",
    "sexagesimal": b"name: 1:" + b"1:" * 5_000 + b"1",
    "sexagesimal with a fraction": b"name: x\ntrain: {seed: 1" + b":1" * 60_000 + b".5}",
    "a bool that is none": b"name: !!bool x",
    "a timestamp that is none": b"name: !!timestamp x",
    "an empty number": b'name: !!int ""',
    "a mapping that is a list": b"name: !!map [1]",
    "a date out of range": b"name: 9999-12-31 23:59:59 -23:59",
    "a character out of range": b'name: "\\UFFFFFFFF"',
    "keys of several types": b"name: x\nconfig: {1: a, b: c, null: d}",
    "many invalid values": b"name: x\nconfig: [" + b".nan, " * 3_000 + b"]",
    "control characters": b"name: \x00\x01\x1b[2J",
    "no UTF-8": b"name: \xff\xfe\xfd",
    "a bare scalar": b"just words",
    "nothing": b"",
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("path", ["/api/v1/jobs", "/api/v1/jobs/validate"])
def test_a_hostile_document_is_refused(served: LiveServer, name: str, path: str) -> None:
    for kind in ("application/yaml", "application/json"):
        refused(post(served, BOMBS[name], kind, path), 400, 422)


ODD_VALUES: dict[str, dict[str, Any]] = {
    "a source of 5,000 characters": {"data": {"source": "/" + "a" * 5_000}},
    "a name of 500 characters": {"data": {"source": "/tmp/" + "a" * 500}},
    "a source without permission": {"data": {"source": "/proc/1/root/x/*"}},
    "a path of 5,000 characters": {"checkpoint": {"remote": {"uri": "/" + "a" * 5_000}}},
    "a folder of 500 characters": {"checkpoint": {"remote": {"uri": "/tmp/" + "a" * 500}}},
    "a NUL in a URI": {"checkpoint": {"remote": {"uri": "file:///tmp/a%00b"}}},
    "a new line in a URI": {"checkpoint": {"remote": {"uri": "s3://bucket/a\nb"}}},
    "half an address in a URI": {"checkpoint": {"remote": {"uri": "s3://[::1/x"}}},
    "credentials in a URI": {"checkpoint": {"remote": {"uri": "s3://key:secret@bucket/x"}}},
    "a NUL in init_from": {"init_from": "file:///tmp/a%00b"},
    "half an address in init_from": {"init_from": "s3://[::1/x"},
    "a folder of 900 characters in init_from": {"init_from": "/" + "a" * 900},
    **{
        f"endpoint {endpoint}": {
            "checkpoint": {"remote": {"uri": "s3://bucket/x", "endpoint": endpoint}}
        }
        for endpoint in (
            *("http://[::1", "http://", "http://:80", "http://h:x", "http://h:99999", "http://h:0"),
            *(
                "http://a b",
                "http://-a",
                "http://h?x",
                "http://h#x",
                "http://a..b",
                "http://[v1.a]",
            ),
            *("ftp://h", "http://h\n", "http://ä", "http://" + "a" * 300),
        )
    },
    "a region with a space": {"checkpoint": {"remote": {"uri": "s3://bucket/x", "region": "a b"}}},
}


@pytest.mark.parametrize("name", ODD_VALUES)
def test_an_odd_value_is_refused_by_its_path(served: LiveServer, name: str) -> None:
    document = {"name": "x", **ODD_VALUES[name]}
    answer = post(served, json.dumps(document).encode(), "application/json")
    problem = refused(answer, 422)
    (section, *_) = ODD_VALUES[name]
    assert {fault["path"].partition(".")[0] for fault in problem["faults"]} == {section}


@pytest.mark.seconds
def test_globs_over_everything_stall_nothing(served: LiveServer) -> None:
    document = {"name": "x", "data": {"source": "/**/*/**/no-such-name-*"}}
    body = json.dumps(document).encode()
    with ThreadPoolExecutor(12) as clients:
        path = "/api/v1/jobs/validate"
        answers = [clients.submit(post, served, body, "application/json", path) for _ in range(12)]
        read = post(served, b"name: y", "application/yaml", path)  # read in another thread
        assert read.status_code == 200
        for answer in answers:
            found = answer.result()
            assert found.status_code in (200, 422), found.text


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/jobs/../../../../etc/passwd",
        "/api/v1/jobs/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/api/v1/jobs/..%5c..%5cwindows",
        "/api/v1/jobs/%00",
        "/api/v1/jobs/x%0d%0aSet-Cookie:%20a=b",
        f"/api/v1/jobs/{UNKNOWN_JOB}/logs/download",
        f"/api/v1/jobs/{UNKNOWN_JOB}/ranks/0",
        f"/api/v1/jobs/{UNKNOWN_JOB}/spec/diff?against={UNKNOWN_JOB}",
        "/api/v1/jobs/" + "a" * 5_000,
        "/api/v1/nodes/%2e%2e%2f%00",
        "/api/v1/code/%2e%2e%2f%00",
        "/api/v1/code/sha256:" + "0" * 64,
        "//api/v1/jobs",
        "http://evil.example/api/v1/jobs",
        "/api/v1/live?job=%00",
    ],
)
def test_a_path_never_leaves_the_api(served: LiveServer, path: str) -> None:
    answer = raw(served, f"GET {path} HTTP/1.1\r\nHost: {host(served)}\r\n")
    status = int(answer.split(b" ", 2)[1])
    assert status in (400, 404, 406, 422), answer[:200]
    assert b"root:" not in answer
    assert b"\r\nset-cookie" not in answer.lower().split(b"\r\n\r\n")[0]


@pytest.mark.parametrize(
    "query",
    [
        "q=%00",
        "q=%ed%a0%80",
        "q=%25%25%25",
        "cursor=AAAA",
        "cursor=W10",
        "view=row",
        "sort=spec",
        "limit=99999999999999999999",
        "limit=1e3",
        "state=QUEUED'--",
        "q=" + "x" * 201,
    ],
)
def test_an_odd_query_is_answered_or_refused(served: LiveServer, query: str) -> None:
    answer = ask(served, "GET", f"/api/v1/jobs?{query}")
    if answer.status_code != 200:  # some queries are valid and find nothing
        refused(answer, 400, 422)


def test_regular_expressions_cannot_hang_the_server(served: LiveServer) -> None:
    job = ask(served, "POST", "/api/v1/jobs", json=SPEC).json()["id"]
    for expression in ("(", "(?=a)", "(a*)*" * 90 + "x", "a{1000}{1000}", r"\p{Nothing}"):
        found = ask(served, "GET", f"/api/v1/jobs/{job}/logs", params={"grep": expression})
        if found.status_code != 200:
            refused(found, 422)


NO_HOSTS = (
    *("", "x@127.0.0.1", "x:y@127.0.0.1", "127.0.0.1:80:80", "127.0.0.1:port", "127.0.0.1:99999"),
    *("127.0.0.1:", "127.0.0.1/", "127.0.0.1/@evil.example", "127.0.0.1?x", "127.0.0.1#x"),
    *("127.0.0.1 evil.example", "127.0.0.1,evil.example", "127.0.0.1\\@evil", "http://127.0.0.1"),
    *("[::1", "::1", "[::1]evil", "[127.0.0.1]", "[v1.x]", "%31", "l\xf6calhost", ":80", "-x"),
)
"""All but `uri-host [":" port]`; a lenient reader finds this server's name in most of them."""


FOREIGN_HOSTS = ("evil.example", "evil.example:8642", "127.0.0.1.", "127.0.0.1.evil.example")


@pytest.mark.parametrize(
    ("lines", "statuses"),
    [
        *((f"Host: {name}\r\n", (421,)) for name in FOREIGN_HOSTS),
        ("", (400,)),
        *((f"Host: {text}\r\n", (400,)) for text in NO_HOSTS),
        ("Host: {host}\r\nHost: evil.example\r\n", (400,)),
        ("Host: {host}\r\nHost: {host}\r\n", (400,)),
        ("Host: {host}\r\nX-Forwarded-Host: x@y\r\n", (200,)),
        ("Host: {host}\r\nOrigin: http://x@{host}\r\n", (403,)),
        ("Host: {host}\r\nOrigin: http://{host}/\r\n", (403,)),
        ("Host: {host}\r\nOrigin: http://{host} \t.evil.example\r\n", (403,)),
        ("Host: {host}\r\nOrigin: http://{host}\r\nOrigin: http://evil.example\r\n", (403,)),
        ("Host: {host}\r\nContent-Length: 99999999999\r\n", (413,)),
        ("Host: {host}\r\nContent-Length: -1\r\n", (400, 413)),
        ("Host: {host}\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n", (400,)),
        ("Host: {host}\r\nContent-Length: 1\r\nContent-Length: 2\r\n", (400,)),
        ("Host: {host}\r\nContent-Length: +1\r\n", (400,)),
        ("Host: {host}\r\nContent-Length: " + "9" * 5_000 + "\r\n", (400, 413)),
        ("Host: {host}\r\nTransfer-Encoding: gzip, chunked\r\n", (400, 501)),
        ("Host: {host}\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n", (400, 501)),
        ("Host: {host}\r\nUpgrade: websocket\r\nConnection: upgrade\r\n", (200,)),
        ("Host: {host}\r\nX-A: b\r\n obs-fold\r\n", (200, 400)),
        ("Host: {host}\r\nX-Forwarded-Host: evil.example\r\n", (200,)),
        ("Host: {host}\r\nLast-Event-ID: \r\nAccept: text/html\r\n", (200,)),
        ("Host: {host}\r\nX-Big: " + "a" * 200_000 + "\r\n", (400, 431)),
    ],
)
def test_hostile_headers_are_refused(
    served: LiveServer, lines: str, statuses: tuple[int, ...]
) -> None:
    head = f"GET /api/v1/jobs HTTP/1.1\r\n{lines.format(host=host(served))}"
    answer = raw(served, head)
    assert int(answer.split(b" ", 2)[1]) in statuses, answer[:200]
    assert b"evil.example/" not in answer


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"-1\r\n", b"f" * 30 + b"\r\n", b"3\r\nabcdef\r\n"])
def test_a_body_in_false_chunks_is_refused(served: LiveServer, chunk: bytes) -> None:
    lines = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    start = f"POST /api/v1/jobs HTTP/1.1\r\nHost: {host(served)}\r\n{lines}{chunk.decode()}"
    assert raw(served, start).startswith(b"HTTP/1.1 400 ")


def test_a_body_that_the_framework_reads_has_a_limit_without_a_length(served: LiveServer) -> None:
    headers = {"content-type": "application/json"}
    content = iter([b" " * 2**16] * 5)
    path = f"/api/v1/jobs/{UNKNOWN_JOB}"
    refused(ask(served, "PATCH", path, content=content, headers=headers), 413)


@pytest.mark.parametrize("cursor", ["x", "1", "a.b.c", "9" * 400, "a.1.1.-.0.0.0.-1", "\x7f"])
def test_a_stream_refuses_an_invalid_position(served: LiveServer, cursor: str) -> None:
    headers = {"accept": "text/event-stream", "last-event-id": cursor}
    refused(ask(served, "GET", "/api/v1/live", headers=headers), 422)


@pytest.mark.parametrize(
    "remote",
    [
        {"endpoint": "http://169.254.169.254"},
        {"endpoint": "http://127.0.0.1:1", "secret": "../job-secrets"},
        {"endpoint": "http://localhost:1", "secret": "absent"},
        {"endpoint": "file:///etc/passwd", "secret": "absent"},
        {"secret": "a\x00b"},
    ],
)
def test_a_storage_that_no_operator_named_is_refused(
    served: LiveServer, remote: dict[str, str]
) -> None:
    document = {"name": "x", "checkpoint": {"remote": {"uri": "s3://bucket/x", **remote}}}
    problem = refused(post(served, json.dumps(document).encode(), "application/json"), 422)
    places = {"checkpoint.remote.secret", "checkpoint.remote.endpoint"}
    assert {fault["path"] for fault in problem["faults"]} <= places


@pytest.mark.parametrize(
    "env",
    [
        {"RAY_AUTH_TOKEN_PATH": "x"},
        {"PYTHONPATH": "/evil"},
        {"A=B": "x"},
        {"": "x"},
        {"A": 1},
        {"A": "x" * 5_000},
        {f"A{number}": "x" for number in range(200)},
        {f"A{number}": "x" * 4_000 for number in range(10)},
    ],
)
def test_an_impossible_environment_is_refused(served: LiveServer, env: dict[str, Any]) -> None:
    body = json.dumps({"name": "x", "env": env}).encode()
    problem = refused(post(served, body, "application/json"), 400, 422)
    assert all(fault["path"].startswith("env") for fault in problem.get("faults", ()))


def test_the_server_still_answers_afterwards(served: LiveServer) -> None:
    answer = ask(served, "GET", "/readyz")
    assert answer.status_code in (200, 503), answer.text
    assert json.loads(answer.text)


def host(server: LiveServer) -> str:
    return urlsplit(server.address).netloc


def raw(server: LiveServer, head: str) -> bytes:
    """The answer to this exact request; an HTTP client would correct it."""
    parts = urlsplit(server.address)
    with socket.create_connection((parts.hostname, parts.port), timeout=DEADLINE_S) as connection:
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode("latin-1"))
        answer = b""
        try:
            while block := connection.recv(65536):
                answer += block
                if len(answer) > 10_000:
                    break
        except ConnectionResetError:
            pass  # the server closed the connection after its answer
    assert answer, "no answer"
    return answer
