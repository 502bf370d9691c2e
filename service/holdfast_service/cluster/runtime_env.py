"""Publishes users' code packages on Ray; each node fetches and unpacks a package once per digest.

Ray keeps a package while a detached actor needs it, and for some time after its publication. Each
node's runtime environment agent gives every incarnation of an agent the same folder. Ray's public
API uploads only folders, so this module uses Ray's internal functions (read and tested with
Ray 2.60).
"""

from __future__ import annotations

from typing import Any

from ray._private.runtime_env import packaging

PINNED_S = 3600
"""How long Ray keeps an unused package: a job may wait for nodes for a while."""


def publish(code: str, content: bytes) -> None:
    """Upload the package to the cluster. Idempotent. Raises RuntimeError."""
    uri = _uri(code)
    packaging.pin_runtime_env_uri(uri, expiration_s=PINNED_S)
    if not packaging.package_exists(uri):
        packaging.upload_package_to_gcs(uri, content)


def with_code(code: str | None) -> dict[str, Any]:
    """Options of an actor whose working directory is the folder of `code`."""
    return {} if code is None else {"runtime_env": {"working_dir": _uri(code)}}


def _uri(code: str) -> str:
    return f"gcs://_ray_pkg_{code.replace(':', '_')}.zip"
