"""The cleanup of the remote tier by a real node agent."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.checkpoint.saved_worlds import save_world
from tests.workers.agent.test_node_agent import SingleAgent, node

from holdfast_workers.checkpoint.manifest import list_checkpoints
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.protocol.commands import TidyRemoteTier
from holdfast_workers.protocol.signals import RetentionDone

__all__ = ["node"]
pytestmark = pytest.mark.chaos


def test_a_failed_cleanup_is_reported_and_the_next_cleanup_removes_all(
    node: SingleAgent, tmp_path: Path
) -> None:
    def tidied(step: int) -> RetentionDone:
        def found() -> list[RetentionDone]:
            details = [signal.detail for signal in node.signals]
            return [d for d in details if isinstance(d, RetentionDone) and d.step == step]

        node.send(TidyRemoteTier("n0", 1, step, (), frozenset()))
        node.wait(lambda: bool(found()))
        return found()[0]

    folder = tmp_path / "checkpoints"
    folder.write_text("no folder")
    assert "NotADirectory" in tidied(1).message
    folder.unlink()
    root = open_storage(str(folder))
    made = [save_world(root, step, 1, {"dp_shard": 1, "tp": 1}) for step in range(1, 6)]
    result = tidied(5)
    kept = {manifest.uri for manifest in list_checkpoints(root)}
    assert set(result.deleted) == {manifest.uri for manifest in made} - kept != set()
    assert made[-1].uri in kept
