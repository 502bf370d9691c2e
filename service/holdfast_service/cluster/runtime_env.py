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
import stat
import threading
import time
import zipfile
from pathlib import PurePosixPath
from typing import Any

import ray
from ray._private.runtime_env import packaging

from holdfast_service.cluster.sent_code import SentCode
from holdfast_service.job_model.supervisor_protocol import LaunchRefused
from holdfast_service.zip_files import UNREADABLE, pieces
from holdfast_workers.ipc.environment import CODE_FOLDER

PINNED_S = 3600
"""How long Ray keeps an unused package: a job may wait for nodes for a while."""
PIN_AGAIN_S = 900.0
"""Tasks and actors that are not detached keep no package: it is published again for them."""
_MODULES = "py_modules"


def publish(code: str, content: bytes | None) -> None:
    """Upload the users' code to the cluster. Idempotent. `content` None: it is not stored any more.
    Raises ConnectionError, LaunchRefused."""
    uri = _uri(code)
    try:
        packaging.pin_runtime_env_uri(uri, expiration_s=PINNED_S)
        if not packaging.package_exists(uri):
            packaging.upload_package_to_gcs(uri, _within_folder(code, content))
    except RuntimeError as error:
        raise ConnectionError(f"the job's code cannot be sent: {error}") from error


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
    """URIs of the packages with this actor's own Holdfast, if a server has sent it."""
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


def _within_folder(code: str, content: bytes | None) -> bytes:
    """The package with all its files in `CODE_FOLDER`. Raises LaunchRefused: no later try finds
    other bytes behind the same digest."""
    if content is None:
        raise LaunchRefused("code_lost", f"the server has no code {code} any more: submit it again")
    moved = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as package, zipfile.ZipFile(moved, "w") as result:
            for entry in package.infolist():
                _copy(package, entry, result)
    except UNREADABLE as error:
        why = f"the code {code} is not a readable zip file ({error}): pack it again"
        raise LaunchRefused("code_unreadable", why) from error
    return moved.getvalue()


def _copy(package: zipfile.ZipFile, entry: zipfile.ZipInfo, result: zipfile.ZipFile) -> None:
    """Piece by piece. Of the permissions only those to execute are kept: `setuid` is not."""
    is_folder = entry.filename.endswith("/")
    path = PurePosixPath(CODE_FOLDER, entry.filename)
    copy = zipfile.ZipInfo(f"{path}/" if is_folder else str(path))
    may_run = is_folder or entry.external_attr >> 16 & stat.S_IXUSR
    kind = stat.S_IFDIR if is_folder else stat.S_IFREG
    copy.external_attr = (kind | (0o755 if may_run else 0o644)) << 16
    copy.file_size = entry.file_size  # so that a large one gets a large header
    copy.compress_type = zipfile.ZIP_STORED if is_folder else zipfile.ZIP_DEFLATED
    with result.open(copy, "w") as target:
        for piece in pieces(package, entry):
            target.write(piece)


def _uri(code: str) -> str:
    return f"gcs://_ray_pkg_{CODE_FOLDER}_{code.replace(':', '_')}.zip"
