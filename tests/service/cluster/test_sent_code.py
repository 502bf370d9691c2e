"""The package of Holdfast's own code: complete, without caches, and the same for the same code."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.cluster.sent_code import own_code, packed, sent_names
from holdfast_workers import build


@pytest.mark.parametrize(
    ("name", "is_sent"),
    [
        ("spec.py", True),
        ("py.typed", True),
        ("store/migrations/script.py.mako", True),
        ("__pycache__/spec.cpython-311.pyc", False),
        ("store/__pycache__/x.py", False),
        ("spec.pyc", False),
        (".hidden", False),
        (".cache/x.py", False),
        ("dashboard/index.html", False),
    ],
)
def test_sources_are_sent_and_caches_are_not(name: str, is_sent: bool) -> None:
    assert sent_names([name]) == ([name] if is_sent else [])


@given(st.dictionaries(st.text("abc/", min_size=1, max_size=8), st.binary(), max_size=6))
def test_an_archive_has_all_files_and_depends_on_nothing_else(files: dict[str, bytes]) -> None:
    backwards = dict(reversed(files.items()))
    content = packed(files)
    assert content == packed(backwards)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == files


@pytest.mark.seconds
def test_the_name_has_the_build_and_changes_with_any_file() -> None:
    code = own_code()
    assert code == own_code()
    assert build.LOADED in code.uri
    with zipfile.ZipFile(io.BytesIO(code.content)) as archive:
        names = archive.namelist()
    packages = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"holdfast", "holdfast_service", "holdfast_workers"}
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)
    assert "holdfast_workers/py.typed" in names


@pytest.mark.slow
def test_the_unpacked_package_is_enough_for_supervisors_agents_and_their_children(
    tmp_path: Path,
) -> None:
    code = own_code()
    with zipfile.ZipFile(io.BytesIO(code.content)) as archive:
        archive.extractall(tmp_path)
    modules = (
        "holdfast_service.cluster.supervisor_actor, holdfast_service.cluster.agent_actor, "
        "holdfast_workers.child_programs.zygote, holdfast_workers.build, "
        "holdfast.integrations.lightning"
    )
    program = (
        f"import sys; sys.path.insert(0, sys.argv[1]); import {modules}\n"
        "print(holdfast_workers.build.LOADED, sorted({name.partition('.')[0] for name in "
        "sys.modules if name.startswith('holdfast')}), holdfast_workers.build.__file__)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    packages = "['holdfast', 'holdfast_service', 'holdfast_workers']"
    assert ran.stdout.startswith(f"{build.LOADED} {packages}")
    assert str(tmp_path) in ran.stdout
