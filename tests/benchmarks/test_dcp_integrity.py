"""Damaged checkpoints raise under Holdfast; PyTorch DCP loads some of them silently."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.dcp_integrity import RAISES, SILENT, UNHARMED, count, of_holdfast, of_stock

FEW = argparse.Namespace(points=25, seed=3)


def test_no_damaged_checkpoint_loads_silently(tmp_path: Path) -> None:
    found = count(of_holdfast(tmp_path), FEW)
    ours = {kind: ends for kind, ends in found.items() if not kind.startswith(".metadata")}
    assert ours
    assert all(set(ends) == {RAISES} for ends in ours.values()), ours
    # Holdfast does not read `.metadata`; it is for other programs.
    assert all(set(found[kind]) == {UNHARMED} for kind in set(found) - set(ours))


def test_the_benchmark_detects_silently_changed_bits(tmp_path: Path) -> None:
    """PyTorch's own reader has no digests."""
    assert count(of_stock(tmp_path), FEW)["__0_0.distcp: one bit changed"][SILENT]
