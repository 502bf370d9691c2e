"""Only versions of Ray whose private interface is known are served."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from holdfast.integrations.ray_train import versions
from holdfast.integrations.ray_train.errors import UnsupportedRay


def test_the_installed_ray_is_supported() -> None:
    versions.check(metadata.version("ray"))


@pytest.mark.parametrize("version", ["2.59.1", "2.61.0", "3.0.0", None])
def test_another_ray_is_refused_with_the_range(version: str | None) -> None:
    with pytest.raises(UnsupportedRay, match=r">=2\.60,<2\.61") as raised:
        versions.check(version)
    assert "pip install" in str(raised.value)


@pytest.mark.seconds
def test_a_rank_with_another_ray_is_refused_before_it_imports_anything_of_it(
    tmp_path: Path,
) -> None:
    """A distribution of that version is found first."""
    (tmp_path / "ray-2.55.0.dist-info").mkdir()
    (tmp_path / "ray-2.55.0.dist-info" / "METADATA").write_text("Name: ray\nVersion: 2.55.0\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n"
        "    import holdfast.integrations.ray_train.rank_process\n"
        "finally:\n"
        "    assert 'ray' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert "UnsupportedRay: Ray 2.55.0 is installed" in done.stderr
