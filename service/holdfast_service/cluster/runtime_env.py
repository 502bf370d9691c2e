"""Publishes packages of code on Ray; each node fetches and unpacks a package once per digest.

- Users' code is the working folder of an agent. Ray puts that folder first on the module path of
  the agent, which has keys. So the code lies in a folder within it, whose name no module has; only
  the zygote of users' code is shown that.
- Holdfast's own code, if the server sends it, is on the module path, before what is installed. An
  actor passes it on to the actors that it starts, and its child processes inherit the path.

Ray keeps a package while a detached actor needs it, and for some time after its publication. Each
node's runtime environment agent gives every incarnation of an agent the same folder. Ray's public
API uploads only folders, so this module uses Ray's internal functions (read and tested with
Ray 2.60).
"""

from __future__ import annotations

import io
import threading
import time
import zipfile
from typing import Any

import ray
from ray._private.runtime_env import packaging

from holdfast_service.cluster.sent_code import SentCode
from holdfast_workers.ipc.environment import CODE_FOLDER

PINNED_S = 3600
"""How long Ray keeps an unused package: a job may wait for nodes for a while."""
PIN_AGAIN_S = 900.0
"""Tasks and actors that are not detached keep no package: it is published again for them."""
_MODULES = "py_modules"


def publish(code: str, content: bytes) -> None:
    """Upload the users' code to the cluster. Idempotent. Raises RuntimeError."""
    uri = _uri(code)
    packaging.pin_runtime_env_uri(uri, expiration_s=PINNED_S)
    if not packaging.package_exists(uri):
        packaging.upload_package_to_gcs(uri, _within_folder(content))


def with_code(code: str | None) -> dict[str, Any]:
    """Options of an actor with the Holdfast of this actor, in whose working directory
    `CODE_FOLDER` has the files of `code`."""
    modules = sent_modules()
    parts = {
        **({"working_dir": _uri(code)} if code is not None else {}),
        **({_MODULES: modules} if modules else {}),
    }
    return {"runtime_env": parts} if parts else {}


def sent_modules() -> list[str]:
    """Where this actor's own Holdfast is stored, if a server has sent it."""
    return list(ray.get_runtime_context().runtime_env.get(_MODULES) or [])


class OwnCode:
    """Holdfast's code on the cluster that this process is connected to."""

    def __init__(self, code: SentCode | None = None) -> None:
        """`code`: None: nothing is sent, and nodes use what they have."""
        self._code = code
        self._lock = threading.Lock()
        self._pinned_at: float | None = None
        self._connection = 0

    @property
    def is_sent(self) -> bool:
        return self._code is not None

    def options(self) -> dict[str, Any]:
        """Options of a task or actor that is to run this code; publishes it if it is not there.
        Raises ConnectionError."""
        if self._code is None:
            return {}
        try:
            self._publish(self._code)
        except RuntimeError as error:
            raise ConnectionError(f"Holdfast's code cannot be sent: {error}") from error
        return {"runtime_env": {_MODULES: [self._code.uri]}}

    def forget_connection(self) -> None:
        """The next cluster may be another one."""
        with self._lock:
            self._pinned_at = None
            self._connection += 1

    def _publish(self, code: SentCode) -> None:
        now = time.monotonic()
        with self._lock:  # not during the calls below, which wait for the cluster
            pinned_at, connection = self._pinned_at, self._connection
        if pinned_at is None or now - pinned_at > PIN_AGAIN_S:
            packaging.pin_runtime_env_uri(code.uri, expiration_s=PINNED_S)
            with self._lock:
                if self._connection == connection:
                    self._pinned_at = now
        if not packaging.package_exists(code.uri):
            packaging.upload_package_to_gcs(code.uri, code.content)


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
