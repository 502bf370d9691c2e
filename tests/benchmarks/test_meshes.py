"""Meshes and options against one process: a selection here, all of them in the soak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.mesh_parity import TOLERANCE, Parity, Row, parity, rows

ALL = tuple(rows())
FEW = {
    "dp_shard 2 × cp 2, ring, zero 3, selective",
    "cp 2 × tp 2, sequence, vocabulary, zero 3, selective",
}
SELECTED = {
    row.name
    for row in ALL
    if (dict(row.mesh) == {"dp_shard": 2, "tp": 2} and row.option.name != "plain")
    or row.name in FEW
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parity]:
    with parity(tmp_path_factory.mktemp("parity")) as found:
        yield found


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.slow if row.name in SELECTED else pytest.mark.soak)
        for row in ALL
    ],
    ids=lambda row: row.name,
)
def test_an_option_gives_the_parameters_of_one_process(measured: Parity, row: Row) -> None:
    assert measured.difference(row) <= TOLERANCE
