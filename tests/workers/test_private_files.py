"""Keys and tokens: on disk before they have a name, and refused where others could reach them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast_workers.private_files import (
    PrivateFileRefused,
    create_private,
    is_exposed,
    read_private,
    write_private,
)

IN_A_MOUNT = """
set -e
mount -t tmpfs tmpfs "$1"
echo secret > "$1/file"
chmod "$2" "$1/file"
mount -o remount,ro "$1"
exec "$3" -c "
import sys
from pathlib import Path
from holdfast_workers.private_files import read_private
print(read_private(Path(sys.argv[1])))
" "$1/file"
"""
NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare"
)
Write = Callable[[Path, "str | bytes"], None]


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
    script = ["sh", "-c", IN_A_MOUNT, "sh", str(tmp_path), mode, sys.executable]
    done = subprocess.run(
        ["unshare", "--mount", *script], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout == "b'secret\\n'\n") is accepted, done.stderr
    assert accepted or "other users can read it" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's file")
@pytest.mark.parametrize(("owner", "accepted"), [(0, True), (12345, False), (54321, True)])
def test_a_file_of_another_user_is_refused_but_not_of_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, accepted: bool
) -> None:
    path = tmp_path / "file"
    write_private(path, "secret")
    os.chown(path, owner, -1)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    if accepted:
        assert read_private(path) == b"secret"
        return
    with pytest.raises(PrivateFileRefused, match=r"belongs to another user: .*chmod 600 the copy"):
        read_private(path)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file", 0o600)
    with pytest.raises(PrivateFileRefused, match="no regular file"):
        read_private(tmp_path / "file")


@pytest.mark.parametrize("write", [write_private, create_private])
def test_a_file_is_on_disk_before_it_has_its_name_and_its_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    path, synced = tmp_path / "key", []

    def recording(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        size = os.fstat(descriptor).st_size if kind == "file" else len("secret")
        synced.append((kind, size, path.exists()))
        fsync(descriptor)

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", recording)
    write(path, "secret")
    assert synced == [("file", 6, False), ("folder", 6, True)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [write_private, create_private])
def test_a_failed_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "key", b"secret")
    assert list(tmp_path.iterdir()) == []


def test_a_prepared_link_at_a_file_to_come_is_not_followed(tmp_path: Path) -> None:
    """As an attacker prepares it who may write into the folder: the name is not to be guessed, and
    a link at the final name is replaced."""
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f".key.{os.getpid()}").symlink_to(tmp_path / "elsewhere")
    write_private(tmp_path / "key", "secret")
    assert not (tmp_path / "elsewhere").exists()
    assert read_private(tmp_path / "key") == b"secret"
