"""The token's file: made once, for its owner only, and refused where others can read it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast_service.host_cluster import node as nodes
from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_service.host_cluster.head_probe import HeadAnswer
from holdfast_service.host_cluster.node import Starter
from holdfast_service.host_cluster.node_record import node_files
from holdfast_service.host_cluster.token_file import read_or_make_token, read_token


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
    path.write_text("a-token")
    path.chmod(mode)
    with pytest.raises(HostClusterError, match=f"chmod 600 {path}"):
        read_token(path)


@pytest.mark.parametrize("text", ["", "\n", "two words", "two\nlines"])
def test_a_file_without_one_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(HostClusterError, match="copy the file from the head again"):
        read_token(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostClusterError, match="cannot read the token file"):
        read_token(tmp_path / "token")


@pytest.mark.parametrize("starts", [True, False])
def test_a_token_takes_the_place_of_another_only_if_the_node_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    files = node_files(tmp_path)
    files.make()
    read_or_make_token(files.token)
    former, given = read_token(files.token), tmp_path / "given"
    read_or_make_token(given)
    in_use = []

    def start(starter: Starter) -> HeadAnswer:
        in_use.append(read_token(Path(starter.node.token)))
        if not starts:
            raise HostClusterError("Ray does not start")
        return HeadAnswer("", "", ())

    monkeypatch.setattr(nodes, "refuse_used_ports", lambda options: None)
    monkeypatch.setattr(Starter, "start", start)
    up = ["cluster", "up", "--node-address", "127.0.0.77", "--data-dir", str(tmp_path)]
    status = run([*up, "--token-file", str(given)])
    assert status == (ExitCode.OK if starts else ExitCode.SERVER)
    assert in_use == [read_token(given)]
    assert read_token(files.token) == (read_token(given) if starts else former)
