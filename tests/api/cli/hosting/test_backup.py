"""`holdfast backup` and `holdfast restore`, and a server that meets a newer schema."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.support.service.databases import migrated_file

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast_service.store.migrate import newest_revision


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "holdfast.db").write_bytes(migrated_file())
    return folder


def test_a_backup_is_summed_up_checked_and_restored(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, new = tmp_path / "one.backup", tmp_path / "new"
    assert run(["backup", str(file), "--data-dir", str(data_dir), "--json"]) == ExitCode.OK
    shown = capsys.readouterr()
    summary = json.loads(shown.out)
    assert (summary["jobs"], summary["rows"], summary["revision"]) == (0, 1, newest_revision())
    assert summary["bytes"] == file.stat().st_size
    assert "jobs: 0 rows" in shown.err
    assert run(["backup", str(file), "--data-dir", str(data_dir)]) == ExitCode.CONFLICT
    assert "--force" in capsys.readouterr().err
    restoring = ["restore", str(file), "--data-dir", str(new)]
    assert run([*restoring, "--dry-run"]) == ExitCode.OK
    shown_plan = capsys.readouterr().out
    assert f"would restore into the database {new / 'holdfast.db'}" in shown_plan
    assert f"setting data_dir: was '{data_dir}', is '{new}'" in shown_plan
    assert not new.exists()
    assert run(restoring) == ExitCode.OK
    assert (new / "holdfast.db").exists()
    assert run(restoring) == ExitCode.CONFLICT
    assert "is not empty" in capsys.readouterr().err
    unwritable = ["backup", "/proc/one.backup", "--data-dir", str(data_dir)]
    assert run(unwritable) == ExitCode.SERVER
    assert capsys.readouterr().err.startswith("error (backup): /proc/")


@pytest.mark.slow
def test_a_newer_schema_is_refused_in_one_line_without_a_traceback(
    data_dir: Path, tmp_path: Path
) -> None:
    with contextlib.closing(sqlite3.connect(data_dir / "holdfast.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.commit()
    said = "schema version 9999, written by a later version of Holdfast, and this one, "
    said += f"{version('holdfast-train')}, reads up to {newest_revision()}: upgrade this "
    for command, code in (
        (["serve", "--port", "0"], ExitCode.SERVER),
        (["backup", str(tmp_path / "one.backup")], ExitCode.CONFLICT),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "holdfast", *command, "--data-dir", str(data_dir)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == code
        [line] = ended.stderr.splitlines()
        assert line.startswith(f"error ({command[0]}): the database has {said}")
        assert "restore a backup" in line
    assert not (tmp_path / "one.backup").exists()
