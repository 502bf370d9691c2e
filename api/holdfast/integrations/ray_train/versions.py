"""The versions of Ray with which this plug-in works: it uses a private interface of Ray Train."""

from __future__ import annotations

from importlib import metadata

from packaging.specifiers import SpecifierSet

from holdfast.integrations.ray_train.errors import UnsupportedRay

SUPPORTED = ">=2.60,<2.61"
"""The tests run on each of these minor versions. Others may have another form of
`ray.train.v2._internal.execution.train_fn_utils`."""


def installed() -> str | None:
    """The installed version of Ray; None if there is none."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return None


def check(version: str | None) -> None:
    """Raises UnsupportedRay unless `version` is supported."""
    install = f"install one with: pip install 'ray[train]{SUPPORTED}'"
    if version is None:
        raise UnsupportedRay(
            f"Ray is not installed, and a Ray Train function needs {SUPPORTED}: {install}"
        )
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        raise UnsupportedRay(
            f"Ray {version} is installed, and Ray Train functions are served with ray{SUPPORTED}, "
            f"because they use a private interface of it: {install}"
        )
