"""The OpenAPI document, printed without a server: `python -m holdfast.rest.openapi`.

Programs that are made from it (the dashboard's types, the reference in the docs) are so at build
time. No route is called, so no service is needed.
"""

from __future__ import annotations

import json
from typing import Any, cast

from holdfast.rest.app import create_app
from holdfast.rest.services import Services


def document() -> dict[str, Any]:
    return create_app(cast(Services, None)).openapi()


if __name__ == "__main__":
    print(json.dumps(document(), indent=1))
