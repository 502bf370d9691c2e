"""The web dashboard: one page and its files, as the build left them in the package.

The page is the same for every view; which one it shows, it reads from the path. Files under
`/assets` bear a hash of their content in their name and are kept by browsers for good; the page
itself is asked for each time. Nothing here is from the API, so it is not in the OpenAPI document.
"""

from __future__ import annotations

import hashlib
import mimetypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response

import holdfast
from holdfast.rest.problems import ProblemError

FOLDER = Path(holdfast.__file__).parent / "dashboard"
"""Where the build (`api/dashboard`) puts its result."""

VIEWS = ("/", "/jobs", "/jobs/{rest:path}", "/cluster", "/submit")
"""Paths that the page's own router knows."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
SAFE = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
FOR_GOOD = "public, max-age=31536000, immutable"
ASK_AGAIN = "no-cache"

_CHUNKS = (
    (re.compile("/(jobs)?"), "JobsPage"),
    (re.compile("/jobs/[^/]+"), "JobPage"),
)
"""Paths, and the module of the view that they show."""

MISSING_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Holdfast</title>
<h1>The dashboard is not built</h1>
<p>This installation has no dashboard in it; the API and the command line work without one.</p>
<p>In a checkout, <code>make setup</code> builds it. Then load this page again.</p>
</html>
"""


@dataclass(frozen=True)
class Asset:
    media_type: str
    plain: bytes
    gzipped: bytes | None
    tag: str


def read(folder: Path) -> Mapping[str, Asset]:
    """Every file of a build by its path; empty if there is none. Nothing else can be asked for."""
    return {
        str(path.relative_to(folder)): _asset(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".gz" and not path.name.startswith(".")
    }


def router(folder: Path = FOLDER) -> APIRouter:
    files = read(folder)

    def page(request: Request) -> Response:
        nonlocal files
        files = files or read(folder)  # built since this server was started
        if "index.html" not in files:
            return Response(MISSING_PAGE, 503, {**SAFE, "Cache-Control": ASK_AGAIN}, "text/html")
        answer = _answer(request, files["index.html"], ASK_AGAIN)
        ahead = _ahead(request.url.path, files)
        if ahead:
            answer.headers["Link"] = ahead
        return answer

    def file(request: Request) -> Response:
        name = request.url.path.lstrip("/")
        if name not in files:
            raise ProblemError(404, "not_found", f"the dashboard has no file {name!r}")
        return _answer(request, files[name], FOR_GOOD if name.startswith("assets/") else ASK_AGAIN)

    made = APIRouter(include_in_schema=False)
    for path in VIEWS:
        made.add_api_route(path, page, methods=["GET", "HEAD"])
    for path in ("/assets/{name:path}", "/boot.js", "/mark.svg"):
        made.add_api_route(path, file, methods=["GET", "HEAD"])
    return made


def _ahead(path: str, files: Mapping[str, Asset]) -> str:
    """The files of the view that the path shows, for the browser to load beside the page's own
    instead of after them. The build names files by their modules."""
    view = next((view for pattern, view in _CHUNKS if pattern.fullmatch(path)), None)
    kinds = {".js": "rel=modulepreload", ".css": "rel=preload; as=style"}
    return ", ".join(
        f"</{name}>; {how}"
        for name in files
        for suffix, how in kinds.items()
        if view is not None and name.startswith(f"assets/{view}-") and name.endswith(suffix)
    )


def _answer(request: Request, asset: Asset, caching: str) -> Response:
    headers = {**SAFE, "Cache-Control": caching, "ETag": asset.tag, "Vary": "Accept-Encoding"}
    if asset.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if asset.gzipped is not None and "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(asset.gzipped, headers=headers, media_type=asset.media_type)
    return Response(asset.plain, headers=headers, media_type=asset.media_type)


def _asset(path: Path) -> Asset:
    content = path.read_bytes()
    gzipped = path.with_name(f"{path.name}.gz")
    return Asset(
        media_type=mimetypes.guess_type(path.name)[0] or "application/octet-stream",
        plain=content,
        gzipped=gzipped.read_bytes() if gzipped.exists() else None,
        tag=f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    )
