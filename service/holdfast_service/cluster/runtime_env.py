"""Users' code on Ray: packages that the nodes fetch and unpack, each once, by their digest.

Ray keeps a package while a detached actor needs it, and for some time after it was published; each
node's runtime environment agent gives every life of an agent the same folder. Ray offers the
upload of a package only for folders, so its own inner functions are used (Ray 2.60 has been read
and tried).
"""

from __future__ import annotations

from typing import Any

from ray._private.runtime_env import packaging

PINNED_S = 3600
"""How long a package stays that nobody needs yet: a job may wait for nodes for a while."""


def publish(code: str, content: bytes) -> None:
    """Make the package known to the cluster; again is the same. Raises RuntimeError."""
    uri = _uri(code)
    packaging.pin_runtime_env_uri(uri, expiration_s=PINNED_S)
    if not packaging.package_exists(uri):
        packaging.upload_package_to_gcs(uri, content)


def with_code(code: str | None) -> dict[str, Any]:
    """Options of an actor that is to live in the folder of `code`."""
    return {} if code is None else {"runtime_env": {"working_dir": _uri(code)}}


def _uri(code: str) -> str:
    return f"gcs://_ray_pkg_{code.replace(':', '_')}.zip"
