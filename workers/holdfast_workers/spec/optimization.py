"""The sections `train.optimizer` and `train.schedule`, and their faults.

Each optimizer has some of the fields. A field that it lacks is null, and one that is set anyway is
a fault: nothing that a user writes is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field

from holdfast_workers.spec.fields import NonNegative, Positive, Section
from holdfast_workers.spec.spec_fault import SpecFault

OptimizerName = Literal["adamw", "sgd", "adafactor", "lion", "muon", "lars", "lamb"]
Decay = Literal["linear", "sqrt", "1-sqrt"]
MOST_GROUPS = 64
Beta = Annotated[float, Field(ge=0, lt=1)]
_Decay = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class _Defaults:
    """The defaults of an optimizer's fields; None for a field that it lacks."""

    weight_decay: float = 0.1
    betas: tuple[float, float] | None = None
    eps: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None


_OF_ADAMW = _Defaults(betas=(0.9, 0.95), eps=1e-8)
_DEFAULTS: Mapping[OptimizerName, _Defaults] = {
    "adamw": _OF_ADAMW,
    "sgd": _Defaults(weight_decay=0.0, momentum=0.9, nesterov=False),
    "adafactor": _Defaults(weight_decay=0.0),
    "lion": _Defaults(betas=(0.9, 0.99)),
    "muon": _Defaults(betas=(0.9, 0.95), eps=1e-8, momentum=0.95, nesterov=True),
    "lars": _Defaults(weight_decay=0.0, momentum=0.9, nesterov=False),
    "lamb": _Defaults(weight_decay=0.01, betas=(0.9, 0.999), eps=1e-6),
}
_HAVE_DEFAULT_RATE = ("adamw", "muon")
OWN_FIELDS = ("betas", "eps", "momentum", "nesterov")
DEFAULT_DECAY_SHARE = 0.2
DEFAULT_DECAY: Decay = "1-sqrt"


def _default(name: str) -> Any:
    """The default of a field that depends on the optimizer."""

    def of(given: Mapping[str, Any]) -> Any:
        return getattr(_DEFAULTS.get(given.get("name", "adamw"), _OF_ADAMW), name)

    return of


class ParameterGroupSpec(Section):
    """Parameters with a decay or a learning rate of their own."""

    match: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        description="Pattern of the names of parameters as in a shell, such as `*.bias` or "
        "`blocks.0.*`. A parameter belongs to the first group that matches it."
    )
    weight_decay: _Decay | None = Field(
        default=None, description="Also of vectors. null: as without the group."
    )
    lr_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.0, description="Factor on the learning rate; 0 keeps the parameters as they are."
    )


class OptimizerSpec(Section):
    name: OptimizerName = Field(
        default="adamw",
        description="muon: of the matrices in blocks; the other parameters are AdamW's, with the "
        "same learning rate.",
    )
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=3e-4, description="The peak. Only adamw and muon have a default."
    )
    weight_decay: _Decay = Field(
        default_factory=_default("weight_decay"),
        json_schema_extra={"default": _OF_ADAMW.weight_decay},
        description="Of matrices; of vectors only if a group says so. It is added to the gradient "
        "by sgd and lars (default 0), and to the update by lamb (0.01); the others shrink the "
        "parameters by lr · weight_decay (0.1; adafactor 0).",
    )
    betas: tuple[Beta, Beta] | None = Field(
        default_factory=_default("betas"),
        json_schema_extra={"default": list(_OF_ADAMW.betas or ())},
        description="Of adamw, lion, lamb and muon: decay of both moments.",
    )
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default_factory=_default("eps"),
        json_schema_extra={"default": _OF_ADAMW.eps},
        description="Of adamw, lamb and muon.",
    )
    momentum: Beta | None = Field(
        default_factory=_default("momentum"),
        json_schema_extra={"default": None},
        description="Of sgd and lars (0.9) and muon (0.95).",
    )
    nesterov: bool | None = Field(
        default_factory=_default("nesterov"),
        json_schema_extra={"default": None},
        description="Of sgd and lars (false) and muon (true).",
    )
    groups: Annotated[tuple[ParameterGroupSpec, ...], Field(max_length=MOST_GROUPS)] = ()
    lr_for_batch: Positive | None = Field(
        default=None,
        description="The global batch that `lr` is meant for: the rate is lr · train.global_batch "
        "/ lr_for_batch. null: `lr` as it is.",
    )

    def group_of(self, parameter: str) -> ParameterGroupSpec | None:
        """The group that the parameter of this name belongs to; None: to none."""
        matching = (group for group in self.groups if fnmatchcase(parameter, group.match))
        return next(matching, None)

    def groups_without(self, parameters: Iterable[str]) -> list[ParameterGroupSpec]:
        """The groups to which none of these belongs."""
        found: set[int] = set()
        for name in parameters:
            found.add(id(self.group_of(name)))
            if found.issuperset(map(id, self.groups)):
                return []
        return [group for group in self.groups if id(group) not in found]

    @staticmethod
    def describe_unused(group: ParameterGroupSpec, parameters: Sequence[str]) -> str:
        """Why a group to which none of the parameters belongs is refused."""
        return (
            f"no parameter belongs to the group {group.match!r}: names are such as "
            f"{parameters[0]} and {parameters[-1]}, and a parameter belongs to the first group "
            "that matches"
        )


class ScheduleSpec(Section):
    name: Literal["cosine", "constant", "linear", "wsd"] = Field(
        default="cosine",
        description="The rate after a linear warm-up. wsd (warm-up, stable, decay): constant, and "
        "a decay at the end.",
    )
    warmup_steps: NonNegative = 20
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    decay_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default_factory=lambda given: DEFAULT_DECAY_SHARE if given.get("name") == "wsd" else None,
        json_schema_extra={"default": None},
        description=f"Of wsd: share of all steps in which the rate decays ({DEFAULT_DECAY_SHARE}).",
    )
    decay: Decay | None = Field(
        default_factory=lambda given: DEFAULT_DECAY if given.get("name") == "wsd" else None,
        json_schema_extra={"default": None},
        description="Of wsd: the rate after a share t of the decay. linear: 1 - t; sqrt: √(1 - t); "
        f"1-sqrt: 1 - √t. The default is {DEFAULT_DECAY}.",
    )

    def decay_steps(self, last_step: int) -> int:
        """The number of steps in which the rate of wsd decays, of a run of `last_step` steps."""
        return max(1, round((self.decay_share or 0.0) * last_step))


def optimization_faults(
    optimizer: OptimizerSpec, schedule: ScheduleSpec, steps: int | None
) -> Iterator[SpecFault]:
    """The faults of both sections; those of patterns need the model's names. `steps`: of the run;
    None: not known yet."""
    yield from _optimizer_faults(optimizer)
    yield from _schedule_faults(schedule, steps)


def _optimizer_faults(optimizer: OptimizerSpec) -> Iterator[SpecFault]:
    defaults, name = _DEFAULTS[optimizer.name], optimizer.name
    for field in OWN_FIELDS:
        has_field, value = getattr(defaults, field) is not None, getattr(optimizer, field)
        path = f"train.optimizer.{field}"
        if has_field and value is None:
            message = f"{name} needs {field}: remove the null, or set a value"
            yield SpecFault(path=path, message=message, beside=("train.optimizer.name",))
        if not has_field and value is not None:
            message = f"{name} has no {field}: remove it"
            yield SpecFault(path=path, message=message, beside=("train.optimizer.name",))
    if name not in _HAVE_DEFAULT_RATE and "lr" not in optimizer.model_fields_set:
        message = f"set lr: {optimizer.lr}, the default, is a rate of adamw and muon, not of {name}"
        yield SpecFault(
            path="train.optimizer.lr", message=message, beside=("train.optimizer.name",)
        )
    if optimizer.nesterov and not optimizer.momentum:
        message = f"nesterov needs a momentum, not {optimizer.momentum}"
        yield SpecFault(
            path="train.optimizer.nesterov", message=message, beside=("train.optimizer.momentum",)
        )


def _schedule_faults(schedule: ScheduleSpec, steps: int | None) -> Iterator[SpecFault]:
    is_wsd = schedule.name == "wsd"
    for field in ("decay_share", "decay"):
        if (getattr(schedule, field) is not None) is not is_wsd:
            verb = "needs" if is_wsd else "has no"
            yield SpecFault(
                path=f"train.schedule.{field}",
                message=f"the schedule {schedule.name} {verb} {field}",
                beside=("train.schedule.name",),
            )
    if not is_wsd or schedule.decay_share is None or steps is None:
        return
    decaying = schedule.decay_steps(steps)
    if schedule.warmup_steps <= steps < schedule.warmup_steps + decaying:
        yield SpecFault(
            path="train.schedule.decay_share",
            message=f"warmup_steps {schedule.warmup_steps} and a decay in {decaying} steps "
            f"(decay_share {schedule.decay_share}) exceed steps {steps}: make one smaller",
            beside=("train.schedule.warmup_steps", "train.steps"),
        )
