"""Settings come from arguments, then the environment, then a folder with a file per setting."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.common import NotUnderstood
from holdfast.cli.hosting.server import settings_of
from holdfast_service.settings import FOLDER_VARIABLE, Settings
from holdfast_workers.node_cache.cached_file import CACHE_VARIABLE

URL = "postgresql://holdfast@database/holdfast"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.delenv("HOLDFAST_DATABASE_URL", raising=False)
    for name, text in {"HOLDFAST_DATABASE_URL": f"{URL}\n", "HOLDFAST_LOCAL_NODES": "2"}.items():
        private(tmp_path / name, text)
    return tmp_path


def private(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text)


def test_a_setting_is_read_from_its_file(folder: Path) -> None:
    found = settings_of()
    assert found.database_url == URL
    assert found.local_nodes == 2


def test_the_environment_and_arguments_come_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", "sqlite:///other.db")
    assert settings_of().database_url == "sqlite:///other.db"
    assert settings_of(database_url="sqlite:///third.db").database_url == "sqlite:///third.db"


def test_an_invalid_file_and_a_missing_folder_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "HOLDFAST_LOCAL_NODES").write_text("many")
    with pytest.raises(NotUnderstood, match="local_nodes"):
        settings_of()
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "absent"))
    with pytest.raises(NotUnderstood, match="absent is not a folder"):
        settings_of()


@pytest.mark.parametrize("mode", [0o444, 0o440, 0o640])
def test_a_file_that_others_can_read_is_refused(folder: Path, mode: int) -> None:
    (folder / "HOLDFAST_DATABASE_URL").chmod(mode)
    with pytest.raises(NotUnderstood, match=r"DATABASE_URL is refused: other users .* chmod 600"):
        settings_of()


@pytest.mark.parametrize("name", ["HOLDFAST_DATABASE_URI", "HOLDFAST_WORKER_ENV"])
def test_a_file_that_names_no_setting_is_refused(folder: Path, name: str) -> None:
    private(folder / name, "value")
    with pytest.raises(NotUnderstood, match=f"{name} names no setting"):
        settings_of()


def test_the_folder_of_a_program_is_a_path_where_the_cluster_is_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    here = Settings(data_dir=tmp_path)
    assert here.program_folder("4711") == f"{tmp_path}/cache/programs/4711"
    monkeypatch.setenv(CACHE_VARIABLE, "/disk")
    assert here.program_folder("4711") == "/disk/programs/4711"
    elsewhere = Settings(data_dir=tmp_path, ray_address="there:6379").program_folder("4711")
    assert elsewhere.startswith("programs/4711 in the cache folder of each of its nodes")


def test_other_files_of_a_mount_are_left_alone(folder: Path) -> None:
    (folder / "root.crt").write_text("certificate")
    (folder / "root.crt").chmod(0o444)
    (folder / "..data").mkdir()
    assert settings_of().database_url == URL


MOUNTED = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/..data"
printf sqlite:///there.db > "$1/..data/HOLDFAST_DATABASE_URL"
chmod "$2" "$1/..data/HOLDFAST_DATABASE_URL"
ln -s ..data/HOLDFAST_DATABASE_URL "$1/HOLDFAST_DATABASE_URL"
mount -o remount,ro "$1"
exec "$3" -c "
from holdfast.cli.common import NotUnderstood
from holdfast.cli.hosting.server import settings_of
try:
    print(settings_of().database_url)
except NotUnderstood as error:
    print(error)
"
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs namespaces")
@pytest.mark.parametrize(("mode", "answer"), [("0440", "sqlite:///there.db"), ("0444", "refused")])
def test_the_group_may_read_the_file_of_a_read_only_mount(
    folder: Path, mode: str, answer: str
) -> None:
    command = ["unshare", "--mount", "sh", "-c", MOUNTED, "sh", str(folder), mode, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer in done.stdout, done.stderr
