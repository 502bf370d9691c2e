"""An exception is read as torch's `@record` writes it, and from a program's last lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from holdfast_workers.ipc.control_channel import MAX_TEXT
from holdfast_workers.program_memory.found_payloads import PayloadDamaged
from holdfast_workers.program_memory.payload_exchange import StateMissing
from holdfast_workers.program_memory.rank_payloads import PeerFailed
from holdfast_workers.programs import error_file
from holdfast_workers.protocol.messages import ErrorKind

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: bad value 3"""


def raised() -> Exception:
    try:
        raise KeyError("the shard 7")
    except KeyError as error:
        return error


def test_a_file_of_torchs_own_handler_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    try:
        raise raised()
    except KeyError as error:
        ErrorHandler().record_exception(error)
    found = error_file.read(path)
    assert found is not None
    assert (found.type, found.message) == ("KeyError", "'the shard 7'")
    assert "Traceback" in found.traceback


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    error_file.write(path, raised())
    found = error_file.read(path)
    assert found is not None
    assert (found.type, found.message) == ("KeyError", "'the shard 7'")


def test_a_file_of_the_program_itself_stays(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "MyError: mine"}}))
    error_file.write(path, raised())
    found = error_file.read(path)
    assert found is not None
    assert found.type == "MyError"


def test_a_file_that_torch_wrote_after_a_crash_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": "Signal 11 (SIGSEGV) received by PID 7"}))
    found = error_file.read(path)
    assert found is not None
    assert found.message == "Signal 11 (SIGSEGV) received by PID 7"


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["message", "extraInfo", "py_callstack"]), inner, max_size=3),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_content_of_the_file_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "error-of-any-content.json"
    path.write_bytes(content)
    found = error_file.read(path)
    assert found is None or isinstance(found.message, str)


def test_no_file_is_no_error(tmp_path: Path) -> None:
    assert error_file.read(tmp_path / "none.json") is None


@pytest.mark.parametrize("mark", ["", "[rank1]: "])
def test_the_exception_is_found_in_the_last_lines(mark: str) -> None:
    output = "\n".join(["step 3", *(mark + line for line in TRACEBACK.splitlines()), "goodbye"])
    found = error_file.of_output("exit code 1", output)
    assert (found.type, found.message) == ("ValueError", "bad value 3")
    assert found.traceback == TRACEBACK


def test_of_several_tracebacks_the_last_counts() -> None:
    later = TRACEBACK.replace("ValueError: bad value 3", "torch.OutOfMemoryError: no memory left")
    found = error_file.of_output("exit code 1", f"{TRACEBACK}\n{later}")
    assert (found.type, found.message) == ("OutOfMemoryError", "no memory left")


def test_without_a_traceback_the_last_line_says_why() -> None:
    found = error_file.of_output("exit code 127", "starting\ncannot run x: No such file\n\n")
    assert found.message == "the program ended with exit code 127: cannot run x: No such file"
    assert error_file.of_output("exit code 3", "").message == "the program ended with exit code 3"


def test_errors_of_memory_checkpoints_tell_what_is_wrong_with_the_state() -> None:
    by_error = {
        PayloadDamaged("step 3 does not match its digest"): ErrorKind.DAMAGED,
        StateMissing("step 3 did not arrive"): ErrorKind.RESTORE,
        PeerFailed("rank 1: step 3 did not arrive"): ErrorKind.COMMUNICATION,
        ValueError("3"): ErrorKind.USER,
    }
    for error, kind in by_error.items():
        line = f"{type(error).__module__}.{type(error).__name__}: {error}"
        output = f"Traceback (most recent call last):\n  File ...\n{line}\n"
        recorded = error_file.of_output("exit code 1", output)
        assert error_file.kind_of(recorded) is kind


PEER_DIES = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    os._exit(1)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.seconds
def test_a_rank_whose_peer_dies_blames_it() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PEER_DIES],
            env={**os.environ, **shared, "TORCHELASTIC_USE_AGENT_STORE": "1", "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    output, _ = (rank.communicate(timeout=60)[1] for rank in ranks)
    recorded = error_file.of_output("exit code 1", output)
    assert error_file.kind_of(recorded) is ErrorKind.COMMUNICATION, output


@pytest.mark.parametrize(
    "line",
    [
        "torch.distributed.DistNetworkError: The client socket has timed out after 1000ms",
        "torch.distributed.DistStoreError: wait timeout after 1000ms, keys: /x",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 900ms for recv",
        "RuntimeError: [c10d] recvValue failed: Connection reset by peer",
    ],
)
@pytest.mark.parametrize("mark", ["", "[rank1]: "])
def test_errors_between_ranks_blame_a_peer(line: str, mark: str) -> None:
    output = f"{mark}Traceback (most recent call last):\n{mark}  File ...\n{mark}{line}\n"
    recorded = error_file.of_output("exit code 1", output)
    assert error_file.kind_of(recorded) is ErrorKind.COMMUNICATION
    wrapped = replace(recorded, type="ValueError", message="training failed")
    assert error_file.kind_of(wrapped) is ErrorKind.COMMUNICATION


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
        TimeoutError("Timed out waiting for the dataset"),
        RuntimeError("could not restore the state: connection closed by the store of features"),
        ValueError("the backend NCCL is not available"),
    ],
)
def test_a_download_that_fails_is_an_error_of_the_program(error: Exception, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    error_file.write(path, error)
    recorded = error_file.read(path)
    assert recorded is not None
    in_torch = '  File "torch/distributed/distributed_c10d.py", line 1, in timeout\n'
    line = f"{type(error).__name__}: {error}"
    output = f"Traceback (most recent call last):\n{in_torch}{line}\n"
    for each in (recorded, error_file.of_output("exit code 1", output)):
        assert error_file.kind_of(each) is ErrorKind.USER


class Unshowable(Exception):
    """It fails to say why."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def fail(error: Exception) -> Exception:
    try:
        raise error
    except Exception as raised_error:
        return raised_error


@pytest.mark.parametrize(
    "message",
    ["x" * 3_000_000, "one line of many\n" * 200_000],
    ids=["one line", "many lines"],
)
def test_a_message_of_megabytes_keeps_the_type_and_the_innermost_frame(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = fail(ValueError(message))
    ours, torchs = tmp_path / "ours.json", tmp_path / "torchs.json"
    error_file.write(ours, error)
    assert ours.stat().st_size < 1 << 17
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(torchs))
    try:
        raise error
    except ValueError:
        ErrorHandler().record_exception(error)
    for path in (ours, torchs):
        found = error_file.read(path)
        assert found is not None
        assert (found.type, found.message[:3]) == ("ValueError", message[:3])
        shown = error_file.shorten(found.traceback)
        assert "in fail\n    raise error\n" in shown and "\nValueError: " in shown
        assert len(shown) <= 2 * MAX_TEXT


def test_an_exception_that_cannot_be_shown_keeps_its_type_and_place(tmp_path: Path) -> None:
    for error in (fail(Unshowable()), fail(KeyError(Unshowable()))):
        path = tmp_path / type(error).__name__
        error_file.write(path, error)
        found = error_file.read(path)
        assert found is not None
        assert found.type == type(error).__name__
        assert "cannot be shown: RuntimeError" in found.message
        assert "in fail\n    raise error\n" in found.traceback


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("the NCCL tests' server closed the connection"),
        RuntimeError("gloo: connection closed by peer, says the service of features"),
    ],
)
def test_what_a_program_raises_itself_blames_no_peer_whatever_it_says(
    error: Exception, tmp_path: Path
) -> None:
    path = tmp_path / "error.json"
    error_file.write(path, fail(error))
    recorded = error_file.read(path)
    assert recorded is not None
    line = f"{type(error).__name__}: {error}"
    output = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    raise x\n{line}'
    for each in (recorded, error_file.of_output("exit code 1", output)):
        assert error_file.kind_of(each) is ErrorKind.USER


@given(st.text(), st.text())
def test_a_text_without_a_transport_blames_nobody(message: str, traceback: str) -> None:
    recorded = error_file.RecordedError("OSError", f"{message} connection reset", traceback)
    named = any(
        word in f"{traceback}{message}".lower() for word in ("gloo", "nccl", "c10d", "dist")
    )
    assert named or not error_file.blames_a_peer(recorded)
