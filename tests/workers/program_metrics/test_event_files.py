"""Metrics from event files, as a real writer writes them, growing, cut short and damaged."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX import SummaryWriter

from holdfast_workers.program_metrics import event_files
from holdfast_workers.program_metrics.event_files import EventFiles
from holdfast_workers.program_metrics.event_records import (
    HEADER,
    DamagedRecord,
    record_bytes,
    scalars,
)
from holdfast_workers.protocol.programs import ProgramStep


def file_in(folder: Path) -> Path:
    (path,) = folder.glob("**/events.out.tfevents.*")
    return path


def written(folder: Path, steps: range) -> bytes:
    with SummaryWriter(str(folder)) as writer:
        for step in steps:
            writer.add_scalar("train/loss", 10.0 / step, step, walltime=1000.0 + step)
            writer.add_scalar("lr-AdamW", 1e-3, step, walltime=1000.0 + step)
            writer.add_scalar("eval accuracy", 0.5, step, walltime=1000.0 + step)
    return file_in(folder).read_bytes()


def values(step: ProgramStep) -> tuple[object, ...]:
    return step.step, step.loss, step.lr, step.own


def test_the_scalars_of_a_step_become_its_metrics(tmp_path: Path) -> None:
    written(tmp_path / "runs" / "a", range(1, 4))
    found = EventFiles(tmp_path, since=0.0).poll(final=True)
    assert [step.step for step in found] == [1, 2, 3]
    assert found[1].loss == 5.0 and found[1].lr == pytest.approx(1e-3)
    assert found[1].own == {"eval_accuracy": 0.5}
    assert [step.step_time_s for step in found] == [0.0, 1.0, 1.0]


def test_steps_may_begin_with_0(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(3):
            writer.add_scalar("loss", 1.0, step)
    found = EventFiles(tmp_path, since=0.0).poll(final=True)
    assert [step.step for step in found] == [0, 1, 2]


def test_the_last_look_reads_all_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_files, "MOST_BYTES", 200)
    written(tmp_path, range(1, 50))
    found = EventFiles(tmp_path, since=0.0).poll(final=True)
    assert [step.step for step in found] == [*range(1, 50)]


def test_the_last_look_has_a_limit_and_says_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, range(1, 4))
    files = EventFiles(tmp_path, since=0.0)
    monkeypatch.setattr(event_files, "LAST_S", 0.0, raising=False)
    assert files.poll(final=True) == []
    assert f"from byte 0 of {file_in(tmp_path).name} on" in files.problem


def test_a_step_is_returned_once_it_is_complete(tmp_path: Path) -> None:
    whole = written(tmp_path, range(1, 3))
    path, end = file_in(tmp_path), 0
    ends = [0]
    while end < len(whole):
        end += record_bytes(whole[end : end + HEADER])
        ends.append(end)
    files = EventFiles(tmp_path, since=0.0)
    path.write_bytes(whole[: ends[-5]])  # without the last scalar of step 1
    assert files.poll() == []
    path.write_bytes(whole[: ends[-3]])
    (first,) = files.poll()
    assert values(first) == (1, 10.0, pytest.approx(1e-3), {"eval_accuracy": 0.5})
    path.write_bytes(whole)
    assert files.poll() == []
    (second,) = files.poll()  # nothing more was written
    assert (second.step, second.loss, files.poll()) == (2, 5.0, [])


def test_a_file_may_end_in_the_middle_of_a_record(tmp_path: Path) -> None:
    whole = written(tmp_path / "a", range(1, 6))
    expected = [values(step) for step in EventFiles(tmp_path / "a", 0.0).poll(final=True)]
    growing = tmp_path / "b" / file_in(tmp_path).name
    growing.parent.mkdir()
    files = EventFiles(growing.parent, 0.0)
    found = []
    for end in range(0, len(whole) + 7, 7):
        growing.write_bytes(whole[:end])

        found += files.poll()
    found += files.poll(final=True)
    assert not files.problem and [step.step for step in found] == [row[0] for row in expected]


def test_events_of_a_former_attempt_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, range(1, 6))
    found = EventFiles(tmp_path, since=1003.5).poll(final=True)
    assert [step.step for step in found] == [4, 5]
    assert EventFiles(tmp_path, since=time.time() + 60).poll(final=True) == []


@pytest.mark.parametrize("at", [0, 9, 40, -2])
def test_a_damaged_file_is_left_out_with_a_reason(tmp_path: Path, at: int) -> None:
    content = bytearray(written(tmp_path, range(1, 3)))
    content[at] ^= 0xFF
    file_in(tmp_path).write_bytes(content)
    files = EventFiles(tmp_path, 0.0)
    files.poll()
    assert "is not read any further" in files.problem
    written(tmp_path / "other", range(1, 3))
    assert [step.step for step in files.poll(final=True)] == [1, 2]


def test_what_is_no_scalar_is_skipped(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("notes", "x" * 200_000, 1)
        writer.add_histogram("weights", list(range(100)), 1)
        writer.add_scalar("loss", float("nan"), 1)
        writer.add_scalar("loss", 4.0, 2)
    found = EventFiles(tmp_path, 0.0).poll(final=True)
    assert [(step.step, step.loss) for step in found] == [(1, None), (2, 4.0)]


def test_a_scalar_of_a_tensor_is_read() -> None:
    tensor = b"\x08\x01\x22\x04" + struct.pack("<f", 2.5)
    value = b"\x0a\x04loss\x42" + bytes([len(tensor)]) + tensor
    summary = b"\x0a" + bytes([len(value)]) + value
    event = b"\x09" + struct.pack("<d", 5.0) + b"\x10\x03\x2a" + bytes([len(summary)]) + summary
    (found,) = scalars(framed(event))
    assert (found.at, found.step, found.tag, found.value) == (5.0, 3, "loss", 2.5)


@given(st.binary(max_size=80))
def test_any_data_in_a_record_are_read_or_refused(data: bytes) -> None:
    record = framed(data)
    assert record_bytes(record[:HEADER]) == len(record)
    try:
        assert isinstance(scalars(record), list)
    except DamagedRecord as error:
        assert str(error)


def framed(data: bytes) -> bytes:
    from tensorboardX.record_writer import masked_crc32c

    header = struct.pack("<Q", len(data))
    return b"".join(
        (
            header,
            struct.pack("<I", masked_crc32c(header)),
            data,
            struct.pack("<I", masked_crc32c(data)),
        )
    )


def test_a_missing_folder_has_no_steps(tmp_path: Path) -> None:
    files = EventFiles(tmp_path / "missing", 0.0)
    assert (files.poll(final=True), files.problem) == ([], "")
