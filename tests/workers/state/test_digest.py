"""The digest of a step depends on the state of every rank and on the rank that holds it."""

from __future__ import annotations

from holdfast_workers.state.digest import step_digest


def test_a_step_digest_depends_on_the_order_of_the_ranks() -> None:
    assert step_digest(("a" * 32, "b" * 32)) != step_digest(("b" * 32, "a" * 32))
