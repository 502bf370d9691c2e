"""Publishes users' code packages on Ray; each node fetches and unpacks a package once per digest.

Ray puts the package's own folder first on the module path of the agent, which has keys. So the code
lies in a folder within it, whose name no module has; only the zygote of users' code is shown that.

Ray keeps a package while a detached actor needs it, and for some time after its publication. Each
node's runtime environment agent gives every incarnation of an agent the same folder. Ray's public
API uploads only folders, so this module uses Ray's internal functions (read and tested with
Ray 2.60).
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

from ray._private.runtime_env import packaging

from holdfast_workers.ipc.environment import CODE_FOLDER

PINNED_S = 3600
"""How long Ray keeps an unused package: a job may wait for nodes for a while."""


def publish(code: str, content: bytes) -> None:
    """Upload the package to the cluster. Idempotent. Raises RuntimeError."""
    uri = _uri(code)
    packaging.pin_runtime_env_uri(uri, expiration_s=PINNED_S)
    if not packaging.package_exists(uri):
        packaging.upload_package_to_gcs(uri, _within_folder(content))


def with_code(code: str | None) -> dict[str, Any]:
    """Options of an actor in whose working directory `CODE_FOLDER` has the files of `code`."""
    return {} if code is None else {"runtime_env": {"working_dir": _uri(code)}}


def _within_folder(content: bytes) -> bytes:
    """The package with all its files in `CODE_FOLDER`."""
    moved = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as package, zipfile.ZipFile(moved, "w") as result:
        for entry in package.infolist():
            file = package.read(entry)
            entry.filename = f"{CODE_FOLDER}/{entry.filename}"
            result.writestr(entry, file)
    return moved.getvalue()


def _uri(code: str) -> str:
    return f"gcs://_ray_pkg_{CODE_FOLDER}_{code.replace(':', '_')}.zip"
