"""Meshes and options against one process: a selection here, all of them in the soak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.parity import OPTIONS, TOLERANCE, Parity, Row, parity, rows, table

ALL = tuple(rows())
FEW = {
    "dp_shard 2 × cp 2, ring, zero 3, selective",
    "cp 2 × tp 2, sequence, vocabulary, zero 3, selective",
}
SELECTED = tuple(
    row
    for row in ALL
    if (dict(row.mesh) == {"dp_shard": 2, "tp": 2} and row.option.name != "plain")
    or row.name in FEW
)


@pytest.fixture(scope="module")
def measured() -> Iterator[Parity]:
    with parity() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("row", SELECTED, ids=lambda row: row.name)
def test_an_option_gives_the_parameters_of_one_process(measured: Parity, row: Row) -> None:
    assert measured.difference(row) <= TOLERANCE


@pytest.mark.soak
def test_every_mesh_with_every_option_gives_the_parameters_of_one_process(
    measured: Parity,
) -> None:
    found = {row.name: measured.difference(row) for row in ALL}
    assert {name: off for name, off in found.items() if not off <= TOLERANCE} == {}


def test_the_table_has_a_line_for_each_mesh_and_a_column_for_each_option() -> None:
    head, _, *lines = table({("dp_shard 2", "plain"): 2e-7}).splitlines()
    assert head.count("|") == len(OPTIONS) + 2
    assert len(lines) == len({str(row.mesh) for row in ALL})
    assert "| `dp_shard 2` | 2e-07 |" in lines[1]
