"""The docs site is built without a warning, and fetches nothing from elsewhere when it is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.main import COMMANDS
from holdfast.rest import openapi
from holdfast.rest.monitoring.metric_series import SERIES
from holdfast_workers.spec import TrainingSpec

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?(https?:[^\s\">]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return target


@pytest.mark.seconds
def test_it_is_whole_and_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 12
    for page in pages:
        assert not FETCHED.findall(page.read_text()), page


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("spec", list(TrainingSpec.model_fields)),
        ("cli", [f"holdfast {command.name}" for command in COMMANDS]),
        ("rest", list(openapi.document()["paths"])),
        ("metrics", [point.name for point in SERIES]),
        ("decisions", ["node_lost", "replace the node"]),
    ],
)
def test_the_reference_names_everything(site: Path, page: str, names: list[str]) -> None:
    text = (site / "reference" / f"{page}.html").read_text()
    assert not [name for name in names if name not in text]
