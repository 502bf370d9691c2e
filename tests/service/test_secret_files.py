"""Files with secrets are refused where others can read them, but not as platforms mount them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast_service.secret_files import is_exposed, refusal

IN_A_MOUNT = """
set -e
mount -t tmpfs tmpfs "$1"
echo secret > "$1/file"
chmod "$2" "$1/file"
mount -o remount,ro "$1"
exec "$3" -c "
import sys
from pathlib import Path
from holdfast_service.secret_files import refusal
path = Path(sys.argv[1])
with path.open() as file:
    print(refusal(file.fileno(), path))
" "$1/file"
"""
NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare"
)


@pytest.mark.parametrize(
    ("mode", "exposed", "exposed_on_read_only_mount"),
    [
        (0o600, False, False),
        (0o400, False, False),
        (0o440, True, False),
        (0o640, True, False),
        (0o460, True, True),
        (0o450, True, True),
        (0o444, True, True),
        (0o404, True, True),
    ],
)
def test_only_a_read_only_mount_may_let_the_group_read(
    mode: int, exposed: bool, exposed_on_read_only_mount: bool
) -> None:
    assert is_exposed(0o100000 | mode, read_only=False) is exposed
    assert is_exposed(0o100000 | mode, read_only=True) is exposed_on_read_only_mount


@NAMESPACES
@pytest.mark.parametrize(("mode", "accepted"), [("0440", True), ("0444", False)])
def test_a_mounted_secret_is_accepted_if_only_its_group_can_read_it(
    tmp_path: Path, mode: str, accepted: bool
) -> None:
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        IN_A_MOUNT,
        "sh",
        str(tmp_path),
        mode,
        sys.executable,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (done.stdout == "None\n") is accepted, done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's file")
@pytest.mark.parametrize(("reader", "accepted"), [(0, True), (12345, False)])
def test_a_file_of_another_user_is_refused_but_not_of_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: int, accepted: bool
) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    os.chown(path, reader, -1)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with path.open() as file:
        found = refusal(file.fileno(), path)
    assert (found is None) is accepted
    assert accepted or "belongs to another user" in str(found)
