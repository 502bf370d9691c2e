"""Serves the web dashboard: a page and its files, as built into the package.

All views share the page, which chooses the view by the path. Files under `/assets` have a hash of
their content in their names, so browsers cache them forever; the page itself is revalidated at each
request. These routes are not part of the API, and not in the OpenAPI document.
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
from holdfast.rest.http.problems import ProblemError

FOLDER = Path(holdfast.__file__).parent / "dashboard"
"""The output folder of the build (`api/dashboard`)."""

VIEWS = ("/", "/jobs", "/jobs/{rest:path}", "/cluster", "/submit")
"""The paths of the page's router."""

CONTENT_SECURITY_POLICY = "; ".join(
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
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
CACHE_FOREVER = "public, max-age=31536000, immutable"
REVALIDATE = "no-cache"

_VIEW_MODULES = (
    (re.compile("/(jobs)?"), "JobsPage"),
    (re.compile("/jobs/[^/]+"), "JobPage"),
)
"""Patterns of paths, with the module of the view at that path."""

MISSING_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Holdfast</title>
<h1>The dashboard is not built</h1>
<p>This installation contains no dashboard; the API and the command line work without it.</p>
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
    """Every file of a build by its path; empty without a build. No other file is ever served."""
    return {
        str(path.relative_to(folder)): _asset(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".gz" and not path.name.startswith(".")
    }


def router(folder: Path = FOLDER) -> APIRouter:
    files = read(folder)

    def page(request: Request) -> Response:
        nonlocal files
        files = files or read(folder)  # the build may have finished after the start of this server
        if "index.html" not in files:
            return Response(
                MISSING_PAGE, 503, {**SECURITY_HEADERS, "Cache-Control": REVALIDATE}, "text/html"
            )
        response = _response(request, files["index.html"], REVALIDATE)
        preload = _preload_links(request.url.path, files)
        if preload:
            response.headers["Link"] = preload
        return response

    def file(request: Request) -> Response:
        name = request.url.path.lstrip("/")
        if name not in files:
            raise ProblemError(404, "not_found", f"the dashboard has no file {name!r}")
        return _response(
            request, files[name], CACHE_FOREVER if name.startswith("assets/") else REVALIDATE
        )

    routes = APIRouter(include_in_schema=False)
    for path in VIEWS:
        routes.add_api_route(path, page, methods=["GET", "HEAD"])
    for path in ("/assets/{name:path}", "/boot.js", "/mark.svg"):
        routes.add_api_route(path, file, methods=["GET", "HEAD"])
    return routes


def _preload_links(path: str, files: Mapping[str, Asset]) -> str:
    """A `Link` header that makes the browser load the files of the view together with the page's
    own files instead of after them. The build names files by their modules."""
    view = next((view for pattern, view in _VIEW_MODULES if pattern.fullmatch(path)), None)
    relations = {".js": "rel=modulepreload", ".css": "rel=preload; as=style"}
    return ", ".join(
        f"</{name}>; {relation}"
        for name in files
        for suffix, relation in relations.items()
        if view is not None and name.startswith(f"assets/{view}-") and name.endswith(suffix)
    )


def _response(request: Request, asset: Asset, caching: str) -> Response:
    headers = {
        **SECURITY_HEADERS,
        "Cache-Control": caching,
        "ETag": asset.tag,
        "Vary": "Accept-Encoding",
    }
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
