from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.dcp_integrity import RAISES, SILENT, UNHARMED, count, of_holdfast, of_stock

FEW = argparse.Namespace(points=25, seed=3)


def test_no_damage_is_loaded_as_if_nothing_were_wrong(tmp_path: Path) -> None:
    found = count(of_holdfast(tmp_path), FEW)
    ours = {kind: ends for kind, ends in found.items() if not kind.startswith(".metadata")}
    assert ours
    assert all(set(ends) == {RAISES} for ends in ours.values()), ours
    # What other programs read is nothing to us.
    assert all(set(found[kind]) == {UNHARMED} for kind in set(found) - set(ours))


def test_the_benchmark_can_tell_other_bits(tmp_path: Path) -> None:
    """Of a reader without digests it says so: torch's own."""
    assert count(of_stock(tmp_path), FEW)["__0_0.distcp: one bit changed"][SILENT]
