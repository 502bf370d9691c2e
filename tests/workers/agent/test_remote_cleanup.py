"""A real node agent that is told to tidy the remote tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint.saved_worlds import save_world
from tests.workers.agent.test_node_agent import OneAgent

from holdfast_workers.checkpoint.manifest import list_checkpoints
from holdfast_workers.checkpoint.storage import open_storage
from holdfast_workers.protocol.messages import SignalKind

pytestmark = pytest.mark.chaos


def test_a_tidier_that_dies_is_told_of_and_the_next_one_removes_what_it_left(
    tmp_path: Path,
) -> None:
    one = OneAgent(tmp_path)

    def tidied(step: int) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            told = [signal for signal in one.signals if signal.kind is SignalKind.TIDIED]
            return [signal.detail for signal in told if signal.detail["step"] == step]

        one.call("tidy", 1, 1, step, (), frozenset())
        one.wait(lambda: bool(found()))
        return found()[0]

    try:
        at = tmp_path / "checkpoints"
        at.write_text("no folder")
        assert "NotADirectory" in tidied(1)["message"]
        at.unlink()
        root = open_storage(str(at))
        made = [save_world(root, step, 1, {"dp_shard": 1, "tp": 1}) for step in range(1, 6)]
        told = tidied(5)
        kept = {manifest.uri for manifest in list_checkpoints(root)}
        assert set(told["deleted"]) == {manifest.uri for manifest in made} - kept != set()
        assert made[-1].uri in kept
    finally:
        one.agents.close()
