"""Where the database file is: its folder's file system and its permissions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast_service.settings import Settings
from holdfast_service.store import file_systems
from holdfast_service.store.engine import Store, UnsupportedDatabase
from holdfast_service.store.file_systems import type_at

MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /proc rw - proc proc rw
30 22 0:50 / /home rw,relatime shared:7 master:2 - nfs4 server:/home rw,vers=4.2
31 30 0:51 / /home/with\040space rw - ext4 /dev/sdb1 rw
32 22 0:52 / /data rw - ext4 /dev/sdc1 rw
33 32 0:53 / /data rw - fuse.sshfs host: rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/homework/db", "ext4"),
        ("/home/me/.holdfast/holdfast.db", "nfs4"),
        ("/home/with space/x", "ext4"),
        ("/data/x", "fuse.sshfs"),
    ],
)
def test_the_innermost_and_latest_mount_counts(path: str, kind: str) -> None:
    assert type_at(Path(path), MOUNTS) == kind


@pytest.mark.parametrize("lines", ["", "\n\n", "broken", "1 2 3 4 - ", "a b c d e - "])
def test_unreadable_lines_count_as_unknown(lines: str) -> None:
    assert not type_at(Path("/x"), lines)


async def test_sqlite_on_a_network_file_system_is_refused_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 8:1 / / rw - ext4 a rw\n30 22 0:5 / {tmp_path} rw - nfs4 s:/x rw\n")
    monkeypatch.setattr(file_systems, "MOUNTS", mounts)
    with pytest.raises(UnsupportedDatabase, match=r"nfs4.*PostgreSQL"):
        await Store.open(Settings(data_dir=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


async def test_the_database_belongs_to_its_owner_only(tmp_path: Path) -> None:
    former = os.umask(0o022)
    try:
        (tmp_path / "holdfast.db").touch(0o644)  # of an earlier version
        store = await Store.open(Settings(data_dir=tmp_path))
        files = {entry.name: entry.stat().st_mode & 0o777 for entry in os.scandir(tmp_path)}
        await store.close()
    finally:
        os.umask(former)
    assert "holdfast.db-wal" in files
    assert set(files.values()) == {0o600}
