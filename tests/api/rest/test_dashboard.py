"""Serving of the dashboard's files; `tests/web` tests its behaviour."""

from __future__ import annotations

import gzip
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from holdfast.rest import dashboard
from holdfast.rest.http import problems

PAGE = "<!doctype html><title>Holdfast</title>"
SCRIPT = "console.log('hello')"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text(PAGE)
    (tmp_path / "assets/main-abc.js").write_text(SCRIPT)
    (tmp_path / "assets/main-abc.js.gz").write_bytes(gzip.compress(SCRIPT.encode()))
    (tmp_path / ".sources").write_text("never served")
    return tmp_path


def client(folder: Path) -> httpx.AsyncClient:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(dashboard.router(folder))
    problems.install(app)
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


@pytest.mark.parametrize("path", ["/", "/jobs", "/jobs/0199/checkpoints", "/cluster", "/submit"])
async def test_every_view_is_the_same_page_and_is_revalidated(built: Path, path: str) -> None:
    async with client(built) as http:
        found = await http.get(path)
        again = await http.get(path, headers={"If-None-Match": found.headers["etag"]})
    assert (found.status_code, found.text) == (200, PAGE)
    assert found.headers["cache-control"] == "no-cache"
    assert found.headers["content-type"].startswith("text/html")
    assert (again.status_code, again.content) == (304, b"")


async def test_assets_are_cached_forever_and_sent_compressed(built: Path) -> None:
    async with client(built) as http:
        found = await http.get("/assets/main-abc.js")
        plain = await http.get("/assets/main-abc.js", headers={"Accept-Encoding": "identity"})
    assert found.headers["content-encoding"] == "gzip"
    assert found.headers["vary"] == "Accept-Encoding"
    assert "immutable" in found.headers["cache-control"]
    assert found.headers["content-type"].startswith("text/javascript")
    assert found.text == plain.text == SCRIPT
    assert "content-encoding" not in plain.headers


@pytest.mark.parametrize("path", ["/", "/assets/main-abc.js"])
async def test_foreign_scripts_and_frames_are_forbidden(built: Path, path: str) -> None:
    async with client(built) as http:
        headers = (await http.get(path)).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/assets/nothing.js",
        "/assets/../index.html",
        "/assets/%2e%2e/.sources",
        "/assets/..%2f..%2fetc/passwd",
        "/.sources",
        "/index.html",
        "/unknown",
        "/api/v1/unknown",
    ],
)
async def test_a_file_outside_the_build_is_not_found(built: Path, path: str) -> None:
    async with client(built) as http:
        found = await http.get(path)
    assert found.status_code == 404
    assert found.json()["code"] == "not_found"


async def test_without_a_build_the_page_explains_how_to_build(tmp_path: Path) -> None:
    async with client(tmp_path) as http:
        found = await http.get("/jobs")
        assert found.status_code == 503
        assert "make setup" in found.text
        (tmp_path / "index.html").write_text(PAGE)
        assert (await http.get("/jobs")).text == PAGE


async def test_the_page_preloads_the_files_of_its_view(built: Path) -> None:
    (built / "assets/JobPage-abc.js").write_text(SCRIPT)
    (built / "assets/JobPage-abc.css").write_text("p {}")
    async with client(built) as http:
        found = (await http.get("/jobs/0199")).headers["link"]
        other_view = (await http.get("/jobs/0199/checkpoints")).headers
    assert "</assets/JobPage-abc.js>; rel=modulepreload" in found
    assert "</assets/JobPage-abc.css>; rel=preload; as=style" in found
    assert "link" not in other_view
