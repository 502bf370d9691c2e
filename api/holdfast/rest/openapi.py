"""Prints the OpenAPI document without a server: `python -m holdfast.rest.openapi`.

The dashboard's types and the reference in the docs are generated from it at build time, and
`api/openapi.json` holds it, so that each change of the API is seen. No route is called, so no
service is needed.
"""

from __future__ import annotations

import json
from typing import Any, cast

from holdfast.rest.app import create_app
from holdfast.rest.services import Services


def document() -> dict[str, Any]:
    return create_app(cast(Services, None)).openapi()


def text() -> str:
    """The document as it is committed in `api/openapi.json`."""
    return json.dumps(document(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(text(), end="")
