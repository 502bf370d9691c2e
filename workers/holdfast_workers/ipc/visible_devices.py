"""The devices that an environment names, in the form in which it names them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Ray sets the one of the node's vendor; the first that names devices counts."""


@dataclass(frozen=True)
class VisibleDevices:
    """`names` of devices, in the form in which `variable` names them."""

    variable: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> VisibleDevices:
        """The devices of a process with this environment."""
        for variable in VARIABLES:
            listed = (name.strip() for name in environment.get(variable, "").split(","))
            names = tuple(name for name in listed if name)
            if names:
                return cls(variable, names)
        return cls(VARIABLES[0], ())

    def environment_of(self, names: Sequence[str]) -> dict[str, str]:
        """The variables of a process that sees only these devices."""
        return {self.variable: ",".join(names)}
