"""The optional parts of an installation (extras), and the command that installs a missing one.

Without extras, the Python client and the commands that talk to a server work. The distribution is
not named `holdfast`, because that is another project on the package index.
"""

from __future__ import annotations

import importlib.util
from enum import StrEnum

from holdfast_service.errors import HoldfastError

DISTRIBUTION = "holdfast-train"
SERVER_PACKAGES = ("ray", "torch", "sqlalchemy", "fastapi", "uvicorn")
"""Packages that only the extra `server` installs."""


class Extra(StrEnum):
    WORKERS = "workers"
    DATA = "data"
    SERVER = "server"
    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"
    RAY_METRICS = "ray-metrics"
    TELEMETRY = "telemetry"
    TRANSFORMERS = "transformers"
    ALL = "all"


class MissingExtra(HoldfastError, code="missing_extra", status=400):
    """The command needs a part of Holdfast that is not installed; the message says which."""


def install_command(extra: Extra) -> str:
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def missing_for_server() -> list[str]:
    """The packages of the server that are not installed. Imports none of them."""
    return [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]


def require_server() -> None:
    """Raises MissingExtra if this installation cannot run a server."""
    if missing := missing_for_server():
        raise MissingExtra(
            f"the server is not installed here (missing: {', '.join(missing)}): "
            f"{install_command(Extra.SERVER)}"
        )
