"""The spec of a replay: the same training, undisturbed, on the meshes of another job. Pure.

A replay is a job like any other. Its labels name the job that it replays and the last step that is
compared, so that any server, and any reader of its spec, knows what it is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.mesh_history import MeshSpan

REPLAY_OF = "replay-of"
REPLAY_UNTIL = "replay-until"
_SUFFIX = "-replay"
_MAX_NAME = 63


@dataclass(frozen=True)
class ReplayMark:
    """The content of a replay's labels."""

    original: str
    """Id of the job that it replays."""
    until_step: int
    """The last step that is compared."""


def replay_mark(spec: Mapping[str, Any]) -> ReplayMark | None:
    """The mark in a stored spec; None: the job is no replay."""
    labels = spec.get("labels") or {}
    original, until_step = labels.get(REPLAY_OF), labels.get(REPLAY_UNTIL, "")
    if not original or not (until_step.isascii() and until_step.isdigit()):
        return None
    return ReplayMark(original, int(until_step))


def replay_document(
    spec: JobSpec,
    mark: ReplayMark,
    history: Sequence[MeshSpan],
    origin: Mapping[str, Any] | None,
    packages: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The document to submit.

    `history`: the meshes of the steps that are compared; an elastic job follows it. `origin`: the
    checkpoint from which the replayed job started, as resolved then: a name in `init_from` may mean
    another one today. `packages`: the exact versions of its packages, if they are known.
    """
    document = spec.model_dump(mode="json")
    document["name"] = spec.name[: _MAX_NAME - len(_SUFFIX)] + _SUFFIX
    owner = {name: text for name, text in spec.labels.items() if name == "owner"}
    document["labels"] = {
        **owner,
        REPLAY_OF: mark.original,
        REPLAY_UNTIL: str(mark.until_step),
    }
    if origin is not None:
        document["init_from"] = {"from": origin["uri"], "what": origin["what"]}
    if packages is not None:
        document["runtime_env"]["pip"] = list(packages)
    document["resources"]["standby_nodes"] = 0
    document["checkpoint"]["remote"]["every_steps"] = 0
    if spec.resources.nodes is not None:
        document["resources"]["nodes"]["schedule"] = [
            {"after_step": span.after_step, "mesh": dict(span.mesh)} for span in history
        ]
        # The world changes its mesh from memory.
        document["checkpoint"]["memory"]["every_steps"] = spec.checkpoint.memory.every_steps or 1
    return document
