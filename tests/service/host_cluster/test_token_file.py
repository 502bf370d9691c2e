"""The token's file: made once, for its owner only, and refused where others can read it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_service.host_cluster.token_file import keep_token, read_or_make_token, read_token


def test_a_token_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_or_make_token(path)
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_or_make_token(path) == token == read_token(path)
    assert read_or_make_token(tmp_path / "other") != token


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    keep_token(path, "a-token")
    path.chmod(mode)
    with pytest.raises(HostClusterError, match=f"chmod 600 {path}"):
        read_token(path)


@pytest.mark.parametrize("text", ["", "\n", "two words", "two\nlines"])
def test_a_file_without_one_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    keep_token(path, text)
    with pytest.raises(HostClusterError, match="copy the file from the head again"):
        read_token(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostClusterError, match="cannot read the token file"):
        read_token(tmp_path / "token")
