"""Settings come from arguments, then the environment, then a folder with a file per setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.common import NotUnderstood
from holdfast.cli.hosting.server import settings_of
from holdfast_service.settings import FOLDER_VARIABLE

URL = "postgresql://holdfast@database/holdfast"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.delenv("HOLDFAST_DATABASE_URL", raising=False)
    (tmp_path / "HOLDFAST_DATABASE_URL").write_text(f"{URL}\n")
    (tmp_path / "HOLDFAST_LOCAL_NODES").write_text("2")
    return tmp_path


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
