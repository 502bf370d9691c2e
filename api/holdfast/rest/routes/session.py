"""`/session`: lets a browser in by a code that is used once."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from holdfast.rest.http.problems import ProblemError, documented
from holdfast.rest.local_access import CODE_VALID_S, SESSION_VALID_S
from holdfast.rest.services import ServicesDep
from holdfast.schemas import SessionCode, SessionKey

# In a header: nothing that somebody unknown sends is read beyond the headers.
Code = Annotated[
    str, Header(alias="Holdfast-Code", description="Of `/session/codes`, or of a printed link.")
]

router = APIRouter(prefix="/api/v1/session", tags=["session"])


@router.post(
    "",
    summary="Exchange a code for the cookie and the page's key of a browser's session",
    responses=documented(401, 422),
    openapi_extra={"security": []},
)
async def open_session(
    request: Request, response: Response, services: ServicesDep, code: Code
) -> SessionKey:
    if services.access is None:
        return SessionKey(page_key="")
    session = services.access.open_session(code)
    if session is None:
        raise ProblemError(
            401,
            "code_refused",
            f"the link was used, or is older than {CODE_VALID_S / 60:.0f} minutes, or the server "
            "was started again: `holdfast dashboard` prints a new one",
            headers={"WWW-Authenticate": "Bearer"},
        )
    response.set_cookie(
        services.access.cookie_name,
        session.cookie,
        max_age=int(SESSION_VALID_S),
        path="/api/",
        httponly=True,
        samesite="lax",
        secure=request.url.scheme == "https",
    )
    return SessionKey(page_key=session.page_key)


@router.post(
    "/codes",
    status_code=201,
    summary="Create a code that lets one browser in",
    responses=documented(401),
)
async def create_code(services: ServicesDep) -> SessionCode:
    return SessionCode(code=None if services.access is None else services.access.issue_code())
