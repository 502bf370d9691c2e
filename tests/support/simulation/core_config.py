"""The configuration of a recovery core, for tests: that of a small job, with a test's changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from pydantic import PrivateAttr

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import JobPlan
from holdfast_service.placement.mesh_choice import MeshLimits
from holdfast_service.placement.mesh_throughput import ALWAYS_GROW
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_workers.spec import TrainingSpec

USUAL: dict[str, Any] = {"on_shortage": "fail", "grow_after_s": 10.0, "grow_min_gain": ALWAYS_GROW}
SECTIONS = ("train", "recovery", "timeouts", "detection", "resources")


class PlayedSpec(JobSpec):
    """A spec whose shapes are given: they need not follow from its sections."""

    _shapes: tuple[WorldShape, ...] = PrivateAttr(default=())
    _schedule: tuple[tuple[int, WorldShape], ...] = PrivateAttr(default=())
    _micro_batches: int = PrivateAttr(default=0)

    @property
    def shapes(self) -> tuple[WorldShape, ...]:
        return self._shapes

    @property
    def schedule(self) -> tuple[tuple[int, WorldShape], ...]:
        return self._schedule

    @property
    def mesh_limits(self) -> MeshLimits:
        return replace(super().mesh_limits, micro_batches=self._micro_batches)


def core_config(
    shapes: Sequence[WorldShape],
    training: TrainingSpec | None = None,
    *,
    schedule: Sequence[tuple[int, WorldShape]] = (),
    micro_batches: int = 0,
    memory: Mapping[str, Any] | None = None,
    remote: Mapping[str, Any] | None = None,
    **changes: Any,
) -> RecoveryConfig:
    """`memory`, `remote`: fields of the tiers. `changes`: fields of other sections, of the spec,
    of the plan and of the configuration, by their names; nothing checks their values."""
    spec = PlayedSpec(name="job", **dict(training or TrainingSpec()))
    tiers = {"memory": memory or {}, "remote": remote or {}}
    updates: dict[str, Any] = {"checkpoint": _tiers(spec, tiers)}
    own, of_plan = (_taken(changes, kind) for kind in (RecoveryConfig, JobPlan))
    for name, value in {**USUAL, **changes}.items():
        section = next((s for s in SECTIONS if name in type(getattr(spec, s)).model_fields), None)
        if section is None:
            assert name in JobSpec.model_fields, name
            updates[name] = value
        else:
            before = updates.get(section, getattr(spec, section))
            updates[section] = before.model_copy(update={name: value})
    spec = spec.model_copy(update=updates)
    spec._shapes, spec._schedule = tuple(shapes), tuple(schedule)
    spec._micro_batches = micro_batches
    return RecoveryConfig(JobPlan(job_id="job", spec=spec, **of_plan), **own)


def _tiers(spec: JobSpec, tiers: Mapping[str, Mapping[str, Any]]) -> Any:
    checkpoint = spec.checkpoint
    update = {
        name: getattr(checkpoint, name).model_copy(update=fields) for name, fields in tiers.items()
    }
    return checkpoint.model_copy(update=update)


def _taken(changes: dict[str, Any], kind: type) -> dict[str, Any]:
    """The changes of fields of this dataclass, which are removed from `changes`."""
    names = {field.name for field in fields(kind)} & changes.keys()
    return {name: changes.pop(name) for name in names}
