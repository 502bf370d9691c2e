"""The identity of an installation: one id for each database, one key for all its servers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.installation import (
    KEY_BYTES,
    WrongKey,
    check_key,
    load_or_create_key,
)

KEY_FILE = "job-secrets.key"
WAIT_S = 60.0


async def test_each_database_has_an_id_that_stays(
    unmigrated_settings: Settings, tmp_path: Path
) -> None:
    ids = []
    for _ in range(2):
        store = await Store.open(unmigrated_settings)
        ids.append(store.installation)
        await store.close()
    other = await Store.open(Settings(data_dir=tmp_path / "other"))
    await other.close()
    assert ids[0] == ids[1] != ""
    assert other.installation not in ("", ids[0])


async def test_a_server_with_another_key_is_refused(store: Store, tmp_path: Path) -> None:
    keys = []
    for name in ("first", "replica"):
        keys.append(load_or_create_key(tmp_path / name / KEY_FILE))
    assert load_or_create_key(tmp_path / "first" / KEY_FILE) == keys[0]
    for key in (keys[0], keys[0]):
        async with store.write() as session:
            await check_key(session, key, Path("here"))
    with pytest.raises(WrongKey, match="copy the file from another server"):
        async with store.write() as session:
            await check_key(session, keys[1], Path("there"))
    async with store.write() as session:
        await check_key(session, keys[0], Path("here"))


def test_servers_that_create_the_key_concurrently_agree_on_it(tmp_path: Path) -> None:
    path, start = tmp_path / KEY_FILE, threading.Barrier(8)

    def make() -> bytes:
        start.wait(WAIT_S)
        return load_or_create_key(path)

    with ThreadPoolExecutor(8) as pool:
        made = {future.result() for future in [pool.submit(make) for _ in range(8)]}
    assert len(made) == 1 and len(made.pop()) == KEY_BYTES
    assert list(tmp_path.iterdir()) == [path]


def test_the_key_belongs_to_its_owner_and_is_complete(tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE
    load_or_create_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    path.chmod(0o644)  # as a copy from another server may be
    load_or_create_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"short")
    with pytest.raises(WrongKey, match="32 bytes"):
        load_or_create_key(path)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs namespaces")
@pytest.mark.parametrize(
    ("mode", "answer"), [("0440", f"{KEY_BYTES}"), ("0444", "is refused: other users can read it")]
)
def test_a_key_on_a_read_only_mount_is_taken_if_only_its_group_can_read_it(
    tmp_path: Path, mode: str, answer: str
) -> None:
    script = (
        'mount -t tmpfs tmpfs "$1" && head -c 32 /dev/zero > "$1/key" && chmod "$3" "$1/key" && '
        'mount -o remount,ro "$1" && exec "$2" -c "import pathlib, sys; '
        "from holdfast_service.store.installation import load_or_create_key; "
        'print(len(load_or_create_key(pathlib.Path(sys.argv[1]))))" "$1/key"'
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer in (done.stdout or done.stderr), done.stderr
