"""Rows and digests in shared memory: what one agent wrote, the next one reads, torn lines apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.service import fake_cluster

from holdfast_workers.agent import row_file
from holdfast_workers.agent.row_file import NEWER, OLDER, Entry, RowFile
from holdfast_workers.agent.run_journal import RunJournal
from holdfast_workers.protocol.messages import StepRow


def row(step: int, ranks: int = 2) -> StepRow:
    values = fake_cluster.row(1, step)
    return replace(values, compute_s=(0.1,) * ranks, own={"accuracy": 0.5})


DIGESTS = st.tuples(st.integers(1, 99), st.text("0af"), st.integers(1, 9))
ENTRIES = st.lists(
    st.one_of(st.builds(row, st.integers(1, 99)), DIGESTS),
    max_size=30,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(parts=st.lists(ENTRIES, max_size=4), torn=st.integers(0, 60))
def test_the_next_agent_reads_all_complete_entries_in_order(
    tmp_path: Path, parts: list[list[Entry]], torn: int
) -> None:
    for name in (NEWER, OLDER):
        (tmp_path / name).unlink(missing_ok=True)
    written: list[Entry] = []
    for part in parts:
        file = RowFile(tmp_path)
        assert file.load() == written
        for entry in part:
            file.add(entry)
        written += part
        with (tmp_path / NEWER).open("a") as begun:  # the agent dies within a line
            begun.write('{"attempt":1,"step":9,"at":1.0,"loss":1.0,"grad_norm":1.0,"lr":'[:torn])
    assert RowFile(tmp_path).load() == written


def test_the_oldest_entries_go_and_the_files_stay_bounded(tmp_path: Path) -> None:
    file = RowFile(tmp_path)
    for step in range(1, 400):
        file.add(row(step, ranks=4096))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * row_file.FILE_BYTES
    steps = [entry.step for entry in RowFile(tmp_path).load() if isinstance(entry, StepRow)]
    assert steps == list(range(steps[0], 400))
    assert len(steps) > 100


def test_without_a_folder_the_run_goes_on(tmp_path: Path) -> None:
    journal = RunJournal("n0", "life")
    journal.keep_in(tmp_path / "gone")
    journal.add_row(row(1))
    assert journal.newest() == row(1)


def test_an_agent_takes_up_the_rows_of_its_former_incarnation(tmp_path: Path) -> None:
    first = RunJournal("n0", "i1")
    first.keep_in(tmp_path)
    for step in (1, 2, 3):
        first.add_row(row(step))
        first.add_digest(step, f"d{step}", 1)
    second = RunJournal("n0", "i2")
    second.keep_in(tmp_path)
    rows, digests = second.after((0, 0))
    assert [one.step for one in rows] == [1, 2, 3]
    assert digests == {1: (1, "d1"), 2: (1, "d2"), 3: (1, "d3")}
    assert not second.add_row(row(4))
    third = RunJournal("n0", "i3")
    third.keep_in(tmp_path)
    assert len(third.after((0, 0))[0]) == 4
